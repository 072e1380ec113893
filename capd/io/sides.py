"""One side of a comparison: the records of a run or of tensor files, found by key and moment.

An entry takes some 500 bytes, so a run of a million records can be matched. Elements are read on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError
from capd.io.items import Test, file_name, moment_of
from capd.pt_files.files import find_files
from capd.pt_files.import_ import load_file
from capd.store.read.store import open_store
from capd_client.process.text import printable
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key, Moment

__all__ = ["Entry", "FileSide", "RunSide", "Side", "Unread", "unread"]


class Entry(NamedTuple):
    """A record: its key, its moment, and its place within its side."""

    key: Key
    moment: Moment
    dtype: str
    shape: tuple[int, ...]
    place: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_NBYTES[self.dtype]


class Unread(NamedTuple):
    """A record that cannot be read, and the reason. `damaged`: whether it is in a run."""

    name: str
    reason: str
    damaged: bool


class Side(Protocol):
    """The source of entries.

    Attributes:
        source: The run, or the directory of files.
        damaged: Whether an entry that cannot be read is a damaged record, not a bad file.
        without_elements: The number of records that keep only statistics, after `entries` has ended.
    """

    source: str
    damaged: bool
    without_elements: int

    def entries(self) -> Iterator[Entry | Unread]:
        """Yield all entries, each series in the order in which its records were captured."""
        ...

    def read(self, entry: Entry) -> NDArray[np.generic]:
        """Return the stored elements. Raises CapdError, OSError, RuntimeError or MemoryError."""
        ...

    def name(self, entry: Entry) -> str:
        """Return the name of an entry in messages."""
        ...


class RunSide:
    """The records of a run whose keys pass all tests, from the job's latest attempt.

    Records that keep only statistics are left out. After `entries` has ended, `without_elements` is their number.
    """

    damaged = True

    def __init__(self, path: Path, tests: Sequence[Test]) -> None:
        self.source = str(path)
        self.without_elements = 0
        self._series = [one for one in open_store(path).find() if all(test(one.key) for test in tests)]

    def entries(self) -> Iterator[Entry | Unread]:
        for at, series in enumerate(self._series):
            try:
                numbers = series.numbers
                if series.kept != "tensor":
                    self.without_elements += len(numbers)
                    continue
            except CapdError as error:
                yield unread(series.path, error, damaged=True)
                continue
            for number in numbers:
                try:
                    record = series.record(number)
                except CapdError as error:
                    yield unread(f"{series.path}#{number}", error, damaged=True)
                    continue
                yield Entry(series.key, moment_of(record), series.dtype, record.shape, (at, number))

    def read(self, entry: Entry) -> NDArray[np.generic]:
        at, number = entry.place
        return self._series[at].read(number)

    def name(self, entry: Entry) -> str:
        at, number = entry.place
        return f"{self._series[at].path}#{number}"


class FileSide:
    """The tensor files below a directory. Each is loaded once when it is found, and again when it is compared."""

    damaged = False
    without_elements = 0

    def __init__(self, root: Path, tests: Sequence[Test], layer_base: int) -> None:
        self.source = str(root)
        self._files, self._tests, self._layer_base = find_files(root), tests, layer_base

    def entries(self) -> Iterator[Entry | Unread]:
        for at, file in enumerate(self._files):
            try:
                record = load_file(file, self._layer_base).record
            except (CapdError, OSError, RuntimeError, MemoryError) as error:
                yield unread(file_name(file), error, damaged=False)
                continue
            capture = record.capture
            if all(test(capture.key) for test in self._tests):
                yield Entry(capture.key, capture.moment, record.dtype, record.bits.shape, (at, 0))

    def read(self, entry: Entry) -> NDArray[np.generic]:
        return load_file(self._files[entry.place[0]], self._layer_base).record.bits

    def name(self, entry: Entry) -> str:
        return file_name(self._files[entry.place[0]])


def unread(name: str, error: BaseException, *, damaged: bool) -> Unread:
    """Return the reason why something cannot be read, in one short line."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return Unread(name, printable(reason[:500]), damaged)
