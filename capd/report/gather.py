"""Measures every item once and merges the results into groups. A few threads read, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.analyze.format_choice import FormatChoice
from capd.analyze.groups import FIELDS, Fields, Groups, Tally, Value
from capd.analyze.verdict.sums import VerdictSums
from capd.io.items import Item, Skipped
from capd.io.sample import Sample
from capd.report.measured import Measured, Measurements, measure
from capd.report.products.linear_calls import Call, LinearCalls
from capd.report.products.product_errors import ProductErrors, Result, measure_products, measured_here
from capd.report.series import SeriesSummaries, emulation_of
from capd_client.protocol.key import Key, Moment

__all__ = [
    "BY_ITERATION", "BY_LAYER", "BY_RANK", "BY_SAMPLE", "BY_TENSOR", "BY_TYPE_AND_LAYER", "CHANNEL_GROUPINGS",
    "COARSE_GROUPINGS", "GROUPINGS", "GatheredRecords", "Skipped", "by_layer", "finish", "gather", "gather_part",
]  # fmt: skip

BY_TENSOR: Fields = ("quant_type", "tensor_name")
BY_TYPE_AND_LAYER: Fields = ("quant_type", "layer")
BY_LAYER: Fields = ("quant_type", "tensor_name", "layer")
BY_ITERATION: Fields = ("quant_type", "tensor_name", "iteration")
BY_SAMPLE: Fields = ("quant_type", "layer", "sample_idx")
BY_RANK: Fields = ("quant_type", "layer", "rank")
# The groupings, and whether each keeps distributions. Groupings with very many groups do not.
GROUPINGS: dict[Fields, bool] = {
    (): True,
    **{(name,): name != "iteration" for name in FIELDS},
    BY_TENSOR: True,
    BY_TYPE_AND_LAYER: False,
    BY_LAYER: True,
    BY_ITERATION: False,
    BY_SAMPLE: True,
    BY_RANK: True,
}
# There may be a group for each tensor of each layer, so its distribution takes some KiB.
COARSE_GROUPINGS = frozenset({BY_LAYER})
CHANNEL_GROUPINGS = frozenset({BY_TENSOR, BY_LAYER})
_MOMENT = frozenset(Moment.__struct_fields__)


@dataclass
class GatheredRecords:
    """The gathered records, merged into groups.

    Attributes:
        without_statistics: The number of records whose values were left out, because they have no stored statistics
            and no element was read.
        unmeasured: The number of records without an error of the requested formats, by series or file and reason.
        series: The summary of each series, if it was requested.
        verdict: The errors of the requested formats, by role and by tensor.
        calls: The calls of linear layers, if the error of their products is requested.
        products: The error of the products.
        emulations: The quant types and emulations that were active, None if a record does not name it.
        error_samples: The samples whose errors were measured while capturing, such as "1/8".
        sample: Counts the records of which elements were read, if not all are to be read.
    """

    groups: Groups = field(default_factory=lambda: Groups(GROUPINGS, CHANNEL_GROUPINGS, COARSE_GROUPINGS))
    series: SeriesSummaries | None = None
    verdict: VerdictSums = field(default_factory=VerdictSums)
    calls: LinearCalls | None = None
    products: ProductErrors | None = None
    emulations: set[tuple[str, str | None]] = field(default_factory=set)
    error_samples: set[str] = field(default_factory=set)
    skipped: list[Skipped] = field(default_factory=list)
    without_statistics: int = 0
    unmeasured: Counter[tuple[str, str]] = field(default_factory=Counter)
    sample: Sample | None = None

    def extend(self, later: GatheredRecords) -> None:
        """Add records that follow these in the source and were gathered for the same questions."""
        self.groups.extend(later.groups)
        self.verdict.extend(later.verdict)
        if self.series is not None and later.series is not None:
            self.series.extend(later.series)
        if self.calls is not None and later.calls is not None:
            self.calls.extend(later.calls)
        self.emulations |= later.emulations
        self.error_samples |= later.error_samples
        self.skipped += later.skipped
        self.without_statistics += later.without_statistics
        self.unmeasured.update(later.unmeasured)
        if self.sample is not None and later.sample is not None:
            self.sample.extend(later.sample)


def gather(
    items: Iterable[Item],
    gathered: GatheredRecords,
    *,
    threads: int,
    quick: bool = False,
    choices: Sequence[FormatChoice] = (),
    per_block: bool = False,
    channels: bool = False,
    stored: bool = False,
    labels: Sequence[str] | None = None,
) -> Iterator[Skipped | int]:
    """Add all items to `gathered`. All are added when the iterator ends.

    About 128 MiB of items are in memory at once, or one item if it is larger, and some MiB for each thread that
    measures formats.

    Args:
        items: The items.
        gathered: Receives the records.
        threads: The number of reading threads.
        quick: Whether to use only stored statistics and to read no element of a run.
        choices: The formats whose error on each high-precision record is measured.
        per_block: Whether to measure the spread of the errors over blocks, too.
        channels: Whether to measure the channels of each record, too.
        stored: Whether to take the errors that were measured while capturing instead, and to read no element.
        labels: The formats of these errors; None: all.

    Yields:
        For each item, in order, its bytes after it was added, 0 if it is not sampled, or the reason why it was skipped.
        At the end, for each operand of a product that could not be read again, the reason.
    """
    yield from gather_part(
        items, gathered, threads=threads, quick=quick, choices=choices, per_block=per_block, channels=channels,
        stored=stored, labels=labels,
    )  # fmt: skip
    measured = measured_here(choices, threads)
    yield from finish(gathered, measured if choices and not quick else None)


def finish(
    gathered: GatheredRecords, measured: Callable[[Sequence[Call]], Iterable[Result]] | None
) -> list[Skipped]:
    """Finish after all records are added. `measured` measures the calls of linear layers, if formats are wanted.

    Returns:
        For each operand of a product that could not be read again, the reason.
    """
    if gathered.series is not None:
        gathered.series.close()
    if gathered.calls is None or measured is None:
        return []
    gathered.products = measure_products(gathered.calls, measured)
    gathered.skipped += gathered.products.skipped
    return gathered.products.skipped


def gather_part(
    items: Iterable[Item],
    gathered: GatheredRecords,
    *,
    threads: int,
    quick: bool = False,
    choices: Sequence[FormatChoice] = (),
    per_block: bool = False,
    channels: bool = False,
    stored: bool = False,
    labels: Sequence[str] | None = None,
) -> Iterator[Skipped | int]:
    """Add all items to `gathered`, as `gather`, and leave open what later items may change."""
    adding = _Adding(gathered)
    wanted = Measurements(quick, choices, per_block, channels, stored, labels)
    with worker_threads(threads, "report") as pool:

        def begin(item: Item) -> Future[Measured | Skipped | None]:
            return pool.submit(measure, item, wanted)

        for item, future in ahead(items, begin, lambda item: item.nbytes, AHEAD_NBYTES):
            measured = future.result()
            if isinstance(measured, Measured):
                adding.add(item, measured)
            elif measured is not None:
                gathered.skipped.append(measured)
            if gathered.sample is not None and isinstance(measured, Measured):
                gathered.sample.add(measured.loaded.raw_bytes, is_read=item.is_sampled)
            yield measured if isinstance(measured, Skipped) else item.nbytes * item.is_sampled
    adding.end_key()


class _Adding:
    """Adds measured items. Neighbours of one key are first merged, and then added once to the groups of keys."""

    def __init__(self, gathered: GatheredRecords) -> None:
        self._gathered, self._groups = gathered, gathered.groups
        self._of_moments = [fields for fields in self._groups.groupings if set(fields) & _MOMENT]
        self._of_keys = [fields for fields in self._groups.groupings if not set(fields) & _MOMENT]
        self._key: Key | None = None
        self._tally = Tally()

    def add(self, item: Item, measured: Measured) -> None:
        loaded, path = measured.loaded, item.name.rpartition("#")[0] or item.name
        if loaded.key != self._key:
            self.end_key()
            self._key = loaded.key
        self._tally.add(measured.tally)
        self._gathered.verdict.add(loaded.key, path, loaded.dtype, measured.tally.errors)
        if not item.is_sampled and loaded.no_source is None:
            self._gathered.verdict.leave_unread(loaded.key, path)
        for fields in self._of_moments:
            values = [getattr(loaded.moment if field in _MOMENT else loaded.key, field) for field in fields]
            self._groups.add(fields, values, measured.tally)
        self._gathered.without_statistics += not measured.has_statistics
        for reason in measured.unmeasured:
            self._gathered.unmeasured[path, reason] += 1
        if loaded.error_sample is not None:
            self._gathered.error_samples.add(loaded.error_sample)
        self._gathered.emulations.add((loaded.key.quant_type, emulation_of(loaded)))
        if self._gathered.series is not None:
            self._gathered.series.add(item, measured)
        if self._gathered.calls is not None:
            self._gathered.calls.add(item, loaded)

    def end_key(self) -> None:
        if self._key is None:
            return
        for fields in self._of_keys:
            self._groups.add(fields, [getattr(self._key, name) for name in fields], self._tally)
        self._key, self._tally = None, Tally()


def by_layer(groups: Groups) -> dict[tuple[Value, ...], Tally]:
    """Merge the records of all ranks by quant type and layer. Groups without a read element are left out."""
    found: dict[tuple[Value, ...], Tally] = {}
    for (one, layer, _), tally in groups.by(*BY_RANK).items():
        found.setdefault((one, layer), Tally()).add(tally)
    return {place: tally for place, tally in found.items() if tally.distribution is not None}
