"""The series with errors of formats that belong to a series of tensors, and their rows by moment.

What the bytes of a row say is the matter of `capd.lab.stored_errors`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from capd.store.catalog.rows import SeriesRow
from capd.store.format.dtypes import stored_type
from capd.store.format.frames import SeriesHeader
from capd_client.protocol.key import Key, Moment

__all__ = ["ErrorRows", "error_series", "of_errors"]


class SeriesHolder(Protocol):
    """One node's part of a run."""

    @property
    def series(self) -> dict[str, SeriesRow]: ...


# A run has thousands of series, and each asks for those of its key.
_by_key: weakref.WeakKeyDictionary[SeriesHolder, dict[tuple[Key, str], list[SeriesRow]]] = (
    weakref.WeakKeyDictionary()
)


class ErrorSource(Protocol):
    """A series with errors of formats."""

    @property
    def attributes(self) -> dict[str, Any]: ...
    @property
    def numbers(self) -> Sequence[int]: ...
    @property
    def moments(self) -> list[Moment]: ...
    def read(self, number: int) -> NDArray[np.generic]: ...


def error_series(node: SeriesHolder, header: SeriesHeader) -> list[SeriesRow]:
    """Return the series with the errors of the records of a series."""
    found = _by_key.get(node)
    if found is None:
        found = _by_key[node] = defaultdict(list)
        for row in node.series.values():
            if row.holds_errors and row.records:
                found[_owner(row.header)].append(row)
    return found.get(_owner(header), [])


def of_errors(node: SeriesHolder, paths: Iterable[str]) -> set[str]:
    """Return the paths of the series with errors of the records of some series, of tensors or of statistics.

    The errors of a key belong to all its series of one dtype: they stay until the last of these is among `paths`.
    """
    gone = set(paths)
    kept = {_owner(row.header) for path, row in node.series.items() if path not in gone and row.holds_tensors}
    headers = [node.series[path].header for path in gone]
    return {
        row.header.path
        for header in headers
        if _owner(header) not in kept
        for row in error_series(node, header)
    }


def _owner(header: SeriesHeader) -> tuple[Key, str]:
    return header.key, stored_type(header.dtype).torch


class ErrorRows:
    """The errors of the records of one series, by moment. Empty without any."""

    def __init__(self, series: Sequence[ErrorSource]) -> None:
        self._series = series

    def __bool__(self) -> bool:
        return bool(self._series)

    @property
    def sample(self) -> str | None:
        """The share of calls that was to be measured; None if nothing says so."""
        said = [one.attributes.get("sample") for one in self._series]
        return next((word for word in said if isinstance(word, str)), None)

    def payloads(self, moment: Moment) -> list[bytes]:
        """Return the rows of records at a moment. There may be several, because a moment can occur twice."""
        return [series.read(number).tobytes() for series, number in self._places.get(moment, ())]

    @cached_property
    def _places(self) -> dict[Moment, list[tuple[ErrorSource, int]]]:
        found: dict[Moment, list[tuple[ErrorSource, int]]] = defaultdict(list)
        for series in self._series:
            for number, moment in zip(series.numbers, series.moments, strict=True):
                found[moment].append((series, number))
        return found
