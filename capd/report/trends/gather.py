"""Measures the metrics of every item once, and merges the results by group, label and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.analyze.groups import Fields, Value
from capd.analyze.trends.sums import Problems, TrendSums
from capd.io.items import UNREADABLE, Item, Loaded, Skipped, skipped
from capd.io.sample import Sample
from capd.report.products.linear_calls import LinearCalls
from capd.report.trends.amax import amax_record
from capd.report.trends.kinds import Follower, TrendKind, TrendOptions, TrendPoint
from capd.report.trends.products import ProductCounts, measure_forwards
from capd.store.read.series import tensor_of
from capd_client.protocol.key import Key, Moment

if TYPE_CHECKING:
    import torch

__all__ = ["TrendGroups", "Trends", "gather_trends"]

_MOMENT = frozenset(Moment.__struct_fields__)
Group = tuple[tuple[Value, ...], str]
"""The values of the fields, and the label."""


@dataclass(slots=True)
class TrendGroups:
    """The sums of one kind by group, label and step: some KiB for each. Not thread-safe.

    Attributes:
        kind: The kind.
        options: The options, with the formats of this kind.
        unmeasured: The number of records without a number, by reason.
        products: What products were measured, of a kind that reads products.
    """

    kind: TrendKind
    options: TrendOptions
    unmeasured: Counter[str] = field(default_factory=Counter)
    products: ProductCounts | None = None
    _steps: dict[Group, dict[int, TrendSums]] = field(default_factory=dict)

    def add(self, values: tuple[Value, ...], label: str, iteration: int, sums: TrendSums) -> None:
        """Add the sums of a record, which are not changed later."""
        steps = self._steps.setdefault((values, label), {})
        if iteration not in steps:
            steps[iteration] = type(sums)()
        steps[iteration].add(sums)

    @property
    def groups(self) -> Mapping[Group, Mapping[int, TrendSums]]:
        """The sums by group and step, in the order in which they were found."""
        return self._steps

    def whole(self, group: Group) -> TrendSums:
        """Return the sums of all steps of a group."""
        steps = list(self._steps[group].values())
        found = type(steps[0])()
        for one in steps:
            found.add(one)
        return found


@dataclass(slots=True)
class Trends:
    """The metrics that were asked for, over the records of a source.

    Attributes:
        fields: The fields of the groups.
        kinds: The sums of each kind, in order.
        skipped: The records and files that could not be read.
        sample: Counts the records that were read, if not all are to be read.
        records: The number of records.
    """

    fields: Fields
    kinds: tuple[TrendGroups, ...]
    skipped: list[Skipped] = field(default_factory=list)
    sample: Sample | None = None
    records: int = 0

    @classmethod
    def of(cls, kinds: Sequence[TrendKind], fields: Fields, options: TrendOptions) -> Trends:
        """Return no record yet."""
        own = [replace(options, choices=tuple(kind.choices(options))) for kind in kinds]
        return cls(fields, tuple(map(TrendGroups, kinds, own)))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a worker found on an item: sums by label, or what following its series needs, by kind."""

    loaded: Loaded
    sums: dict[str, Mapping[str, TrendSums]]
    snapshots: dict[str, Any]
    problems: dict[str, Problems]


def gather_trends(items: Iterable[Item], trends: Trends, *, threads: int) -> Iterator[Skipped | int]:
    """Add all items. The records of a series have to follow each other, in the order of their steps.

    About 128 MiB are in memory at once, or one record with its work if that is more, and the sums of each group and
    step. Following weights (`oscillation`) holds the last record of one series besides.

    Yields:
        For each item, in order, its bytes after it was added, 0 if it is not sampled, or the reason why it was skipped.
        At the end, for each operand of a product that could not be read again, the reason.
    """
    adding = _Series(trends)
    calls = LinearCalls() if any(one.kind.reads == "products" for one in trends.kinds) else None
    work = max((one.kind.work for one in trends.kinds), default=1)
    with worker_threads(threads, "metrics") as pool:

        def begin(item: Item) -> Future[_Seen | Skipped | None]:
            return pool.submit(_seen, item, trends)

        for item, future in ahead(items, begin, lambda item: work * item.nbytes, AHEAD_NBYTES):
            seen = future.result()
            if isinstance(seen, _Seen):
                trends.records += 1
                adding.add(item, seen)
                if calls is not None:
                    calls.add(item, seen.loaded)
                if trends.sample is not None:
                    trends.sample.add(seen.loaded.raw_bytes, is_read=item.is_sampled)
            elif seen is not None:
                trends.skipped.append(seen)
            yield seen if isinstance(seen, Skipped) else item.nbytes * item.is_sampled
    adding.close()
    for one in trends.kinds:
        if one.kind.reads == "products" and calls is not None:
            yield from _add_products(trends, one, calls, threads)


def _seen(item: Item, trends: Trends) -> _Seen | Skipped | None:
    try:
        loaded = item.load()
        return None if loaded is None else _measured(loaded, trends, is_read=item.is_sampled)
    except UNREADABLE as error:
        return skipped(item.name, error)


def _measured(loaded: Loaded, trends: Trends, *, is_read: bool) -> _Seen:
    seen = _Seen(loaded, {}, {}, {})
    values: torch.Tensor | None = None
    has_elements = loaded.read is not None and loaded.no_source is None and is_read
    if loaded.read is not None and has_elements and any(one.kind.reads != "products" for one in trends.kinds):
        values = tensor_of(loaded.read(), loaded.dtype)
    for one in trends.kinds:
        kind, options = one.kind, one.options
        if kind.reads == "products":
            continue
        if kind.reads == "statistics":
            seen.snapshots[kind.name], seen.problems[kind.name] = amax_record(loaded, values)
        elif values is None:
            if is_read:
                seen.problems[kind.name] = [loaded.no_source or "its elements were not kept"]
        elif kind.snapshot is not None:
            seen.snapshots[kind.name], seen.problems[kind.name] = kind.snapshot(values, options)
        elif kind.measure is not None:
            seen.sums[kind.name], seen.problems[kind.name] = kind.measure(values, options)
    return seen


class _Series:
    """Adds what was found, and follows one series at a time."""

    def __init__(self, trends: Trends) -> None:
        self._trends = trends
        self._name: str | None = None
        self._key: Key | None = None
        self._last: Moment | None = None
        # Of the step that is open, and of the record that is added.
        self._moments: dict[int, Moment] = {}
        self._followers: dict[str, Follower] = {}

    def add(self, item: Item, seen: _Seen) -> None:
        loaded, name = seen.loaded, item.name.rpartition("#")[0] or item.name
        moment = loaded.moment
        # Capture order goes back where a later attempt began again.
        if name != self._name or (self._last is not None and moment.iteration < self._last.iteration):
            self.close()
        self._name, self._key, self._last = name, loaded.key, moment
        self._moments.setdefault(moment.iteration, moment)
        for one in self._trends.kinds:
            for reason in seen.problems.get(one.kind.name, ()):
                one.unmeasured[reason] += 1
            for label, sums in seen.sums.get(one.kind.name, {}).items():
                one.add(_values(self._trends.fields, loaded.key, moment), label, moment.iteration, sums)
            found = seen.snapshots.get(one.kind.name)
            if one.kind.follower is None or found is None:
                continue
            if one.kind.name not in self._followers:
                self._followers[one.kind.name] = one.kind.follower(one.options)
            self._add_points(one, self._followers[one.kind.name].add(moment.iteration, found))
        self._moments = {moment.iteration: self._moments[moment.iteration]}

    def close(self) -> None:
        """End the series."""
        for one in self._trends.kinds:
            if one.kind.name in self._followers:
                self._add_points(one, self._followers.pop(one.kind.name).close())
        self._moments, self._last = {}, None

    def _add_points(self, to: TrendGroups, points: Iterator[TrendPoint]) -> None:
        if self._key is None:
            return
        for iteration, label, sums in points:
            moment = self._moments.get(iteration, Moment(iteration=iteration))
            to.add(_values(self._trends.fields, self._key, moment), label, iteration, sums)


def _values(fields: Fields, key: Key, moment: Moment) -> tuple[Value, ...]:
    return tuple(getattr(moment if name in _MOMENT else key, name) for name in fields)


def _add_products(
    trends: Trends, to: TrendGroups, calls: LinearCalls, threads: int
) -> Iterator[Skipped | int]:
    to.products = ProductCounts()
    for forward, found in measure_forwards(calls, to.options.choices, to.products, threads):
        if isinstance(found, Skipped):
            trends.skipped.append(found)
            yield found
            continue
        sums, problems = found
        for reason in problems:
            to.unmeasured[reason] += 1
        values = _values(trends.fields, forward.key, forward.moment)
        for label, one in sums.items():
            to.add(values, label, forward.moment.iteration, one)
    if not to.products.found:
        to.unmeasured["the input and the weight of a linear layer were not both captured"] = trends.records
