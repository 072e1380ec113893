"""One side of a comparison: the records of a run or of tensor files, found by key and moment.

An entry takes some 800 bytes, so a run of a million records can be matched. Elements are read on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.io.items import UNREADABLE, Items, Skipped, Test, items_of_files, items_of_runs, skipped
from capd.store.objects.address import RunPlace
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key, Moment

__all__ = ["Entry", "Side", "file_side", "run_side"]


class Entry(NamedTuple):
    """A record with elements.

    Attributes:
        name: Its name in messages.
        read: Returns the elements, or raises UNREADABLE.
        reference: As in `Item`.
    """

    key: Key
    moment: Moment
    dtype: str
    shape: tuple[int, ...]
    name: str
    read: Callable[[], NDArray[np.generic]]
    reference: tuple[str, str, str, int] | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_NBYTES[self.dtype]


class Side:
    """The source of entries.

    Attributes:
        source: The run, or the directory of files.
        damaged: Whether an entry that cannot be read is a damaged record, not a bad file.
        without_elements: The number of records that keep only statistics, after `entries` was called.
    """

    def __init__(self, source: RunPlace, items: Items, *, damaged: bool) -> None:
        self.source, self.damaged, self._items = str(source), damaged, items
        self.without_elements = 0

    def entries(self) -> tuple[list[Entry], list[Skipped]]:
        """Return all entries, each series in the order in which its records were captured, and unreadable records."""
        found: list[Entry] = []
        problems: list[Skipped] = []
        for item in self._items.found:
            if item.read is None:
                self.without_elements += 1
                continue
            try:
                loaded = item.load()
            except UNREADABLE as error:
                problems.append(skipped(item.name, error, damaged=self.damaged))
                continue
            if loaded is not None:
                found.append(
                    Entry(
                        loaded.key,
                        loaded.moment,
                        loaded.dtype,
                        loaded.shape,
                        item.name,
                        item.read,
                        item.reference,
                    )
                )
        return found, problems


def run_side(path: RunPlace, tests: Sequence[Test], attempt: int | str = "latest") -> Side:
    """Return the records of a run whose keys pass all tests. attempt: as in `Store.find`."""
    return Side(path, items_of_runs([path], tests, attempt=attempt), damaged=True)


def file_side(root: Path, tests: Sequence[Test], layer_base: int) -> Side:
    """Return the tensor files below a directory. Each is loaded when it is found, and again when it is compared."""
    return Side(root, items_of_files(root, tests, layer_base, statistics=False), damaged=False)
