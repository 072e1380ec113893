"""The record rows of one series, fetched in windows: a reader of record i pays for its neighbours, not for all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

from capd.errors import DamagedRecord
from capd.store.catalog.rows import SeriesRow
from capd.store.format.frames import RecordHead, RecordRow
from capd.store.read.recent import Recent
from capd.store.read.source import RunNode
from capd_client.protocol.key import Moment

__all__ = ["NewestAttempts", "SeriesRows"]

_WINDOW = 1024
# For full rows. The heads of all records are kept.
_KEPT_WINDOWS = 4
H = TypeVar("H", bound=RecordHead)


class SeriesRows:
    """The records 0 ≤ number < `row.records` of a series, filtered by attempt ("all", "latest" or a number).

    newest: The newest attempts over all series of the key; None if the key has no other series.
    """

    def __init__(
        self, node: RunNode, row: SeriesRow, attempt: int | str = "all", newest: NewestAttempts | None = None
    ) -> None:
        self._node, self._row, self._attempt, self._newest = node, row, attempt, newest
        self._rows: Recent[int, dict[int, RecordRow]] = Recent(_KEPT_WINDOWS)
        self._ids: Recent[int, dict[int, RecordHead]] = Recent(sys.maxsize)

    @cached_property
    def numbers(self) -> Sequence[int]:
        """The numbers of the chosen records in the array, in capture order."""
        everything = range(self._row.records)
        if self._attempt == "all":
            return everything
        first, last = self.attempts
        if self._attempt == "latest":
            newest = self._newest or NewestAttempts([(self._node, self._row)])
            if first == newest.last:
                return everything
            return [number for number in everything if newest.includes(self._id_of(number).moment)]
        if first == last:
            return everything if self._attempt == first else ()
        return [number for number in everything if self._id_of(number).moment.attempt == self._attempt]

    def moments(self) -> Iterator[Moment]:
        """Yield the moments of all records. Raises DamagedRecord if one is not known."""
        return (self._id_of(number).moment for number in range(self._row.records))

    @cached_property
    def attempts(self) -> tuple[int, int]:
        """The first and the last attempt among all records; (0, 0) without records."""
        if self._row.records > _WINDOW:
            return self._node.attempts(self._row.header.path)
        known = [self._id_of(number).moment.attempt for number in range(self._row.records)] or [0]
        return min(known), max(known)

    def row(self, number: int) -> RecordRow:
        """Return the row of one record. Raises DamagedRecord if neither catalog nor frames know it."""
        return self._named(self._row_of(number), number)

    def id(self, number: int) -> RecordHead:
        """Return the head of one record. Raises DamagedRecord if neither catalog nor frames know it."""
        return self._named(self._id_of(number), number)

    def _named(self, found: H, number: int) -> H:
        if found.is_lost:
            raise DamagedRecord(
                f"{self._row.header.path}#{number}: no file describes this record any more; "
                f"`capd verify {self._node.run} --repair -o NEW` makes a run without it"
            )
        return found

    def _row_of(self, number: int) -> RecordRow:
        return self._find(number, self._rows, self._node.rows)

    def _id_of(self, number: int) -> RecordHead:
        return self._find(number, self._ids, self._node.ids)

    def _find(
        self, number: int, windows: Recent[int, dict[int, H]], fetch: Callable[[str, int, int], dict[int, H]]
    ) -> H:
        window = number // _WINDOW
        held = windows.get(window)
        if held is None:
            held = fetch(self._row.header.path, window * _WINDOW, (window + 1) * _WINDOW)
            windows.put(window, held)
        if number not in held:
            self._node.check_removal(self._row.header.path)
            raise DamagedRecord(
                f"{self._row.header.path}#{number}: neither the catalog nor the frames of {self._node.directory} "
                "have a row of it; `capd verify` lists all damage"
            )
        return held[number]


class NewestAttempts:
    """The newest attempt at each moment of one key, over all series of it: other dtypes, shapes and nodes, too.

    A job that goes on may run its rank on another node, compute in another dtype, or keep only statistics. Its records
    are then in another series, and replace those of the earlier attempt all the same.
    """

    def __init__(self, series: Iterable[tuple[RunNode, SeriesRow]]) -> None:
        self._series = list(series)

    @property
    def places(self) -> list[tuple[str, SeriesRow]]:
        """The series, each with the name of its node."""
        return [(node.name, row) for node, row in self._series]

    @cached_property
    def last(self) -> int:
        """The last attempt that has a record."""
        return max(SeriesRows(node, row).attempts[1] for node, row in self._series)

    def includes(self, moment: Moment) -> bool:
        """Return whether no later attempt has a record of the same moment."""
        return moment.attempt == self._by_moment[_without_attempt(moment)]

    @cached_property
    def _by_moment(self) -> dict[tuple[object, ...], int]:
        newest: dict[tuple[object, ...], int] = {}
        for node, row in self._series:
            for moment in SeriesRows(node, row).moments():
                when = _without_attempt(moment)
                newest[when] = max(newest.get(when, 0), moment.attempt)
        return newest


def _without_attempt(m: Moment) -> tuple[object, ...]:
    return (m.iteration, m.micro_batch, m.call, m.sample_idx, m.batch_idx, m.sequence_idx, m.recompute)
