"""The rows of errors in a merge: each follows the record that it is of, whatever client wrote the row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capd.lab.stored_errors import unpack_row
from capd.store.format.frames import RecordRow
from capd.store.read.series import Series

__all__ = ["Capture", "captures_measured", "rows_of_errors"]

Capture = tuple[bytes, int]


def rows_of_errors(everything: Sequence[Series]) -> Iterator[tuple[RecordRow, Capture]]:
    """Yield each row of errors, with the capture that it is of.

    Raises:
        DamagedRecord: A row cannot be read.
    """
    for series in everything:
        if series.kept == "errors":
            for number in series.numbers:
                found = unpack_row(series.read(number).tobytes())
                yield series.row(number), (found.client, found.sequence)


def captures_measured(everything: Sequence[Series]) -> set[Capture]:
    """Return the captures that have errors. Raises as `rows_of_errors`."""
    return {capture for _, capture in rows_of_errors(everything)}
