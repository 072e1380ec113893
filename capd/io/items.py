"""Records of runs, or of a directory of tensor_saver's files, as items to look at.

An item is found without reading it. `load` returns its description, and `read` returns its elements. Both may be called
in another thread than the one that found the item.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from capd.errors import StoreError
from capd.pt_files.files import TensorFile, find_files
from capd.pt_files.import_ import load_file
from capd.store.format.statistics import Stats, public, summarise
from capd.store.read.series import Record, Series
from capd.store.read.store import open_store
from capd_client.process.text import printable
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.statistics_row import ROW_VALUES

__all__ = [
    "SOURCE_DTYPES", "Item", "Items", "Loaded", "Test", "file_name", "items_of_files", "items_of_runs", "moment_of",
]  # fmt: skip

SOURCE_DTYPES = ("bfloat16", "float16", "float32", "float64")
Test = Callable[[Key], bool]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded item.

    Attributes:
        raw_bytes: The kept bytes of the item.
        stats: The statistics, None if they are unknown before the elements are read.
        read: Returns the stored elements. None if only statistics were kept.
        attributes: The record's attributes, as in `Record.attributes`.
    """

    key: Key
    moment: Moment
    dtype: str
    raw_bytes: int
    stats: Stats | None
    read: Callable[[], NDArray[np.generic]] | None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()

    @property
    def no_source(self) -> str | None:
        """The reason why no format can be measured on the item. None for complete high-precision values."""
        if self.read is None:
            return "only its statistics were kept"
        if "tensor_class" in self.attributes:
            return f"it is a part of a quantised tensor ({printable(str(self.attributes['tensor_class'])[:200])})"
        if self.dtype not in SOURCE_DTYPES:
            return f"{self.dtype} is no high-precision source; these are {', '.join(SOURCE_DTYPES)}"
        return None


@dataclass(frozen=True, slots=True)
class Item:
    """An item. `load` and `Loaded.read` raise CapdError, OSError, RuntimeError or MemoryError.

    Attributes:
        name: The name in messages.
        nbytes: The memory that the item takes after it is read.
        load: Returns the loaded item, None if the selection leaves it out.
    """

    name: str
    nbytes: int
    load: Callable[[], Loaded | None]


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a source. `total` is their number. `found` makes each on request, as a run may have millions."""

    total: int
    found: Iterable[Item]


def items_of_runs(paths: Sequence[Path], tests: Sequence[Test]) -> Items:
    """Return the records of runs whose keys pass all tests, series by series.

    If records share a moment, only the job's latest attempt counts.

    Raises:
        NotAStore: If a path is no run.
        StoreError: If a run cannot be opened.
    """
    series = [
        (f"{path}/{one.path}" if len(paths) > 1 else one.path, one, _numbers(one))
        for path in paths
        for one in open_store(path).find()
        if all(test(one.key) for test in tests)
    ]
    total = sum(1 if isinstance(numbers, StoreError) else len(numbers) for _, _, numbers in series)
    return Items(total, _each(series))


def _each(series: Sequence[tuple[str, Series, Sequence[int] | StoreError]]) -> Iterator[Item]:
    for name, one, numbers in series:
        if isinstance(numbers, StoreError):
            yield Item(name, 0, partial(_fail, numbers))
        else:
            yield from (_item(f"{name}#{number}", one, number) for number in numbers)


def _numbers(series: Series) -> Sequence[int] | StoreError:
    try:
        return series.numbers
    except StoreError as error:
        return error


def _item(name: str, series: Series, number: int) -> Item:
    try:
        record = series.record(number)
    except StoreError as error:
        return Item(name, 0, partial(_fail, error))
    whole = series.kept == "tensor"
    nbytes = prod(record.shape) * ITEM_NBYTES[series.dtype] if whole else 8 * ROW_VALUES

    def load() -> Loaded:
        return Loaded(
            series.key, moment_of(record), series.dtype, nbytes,
            record.committed_stats if whole else record.stats,
            partial(series.read, number) if whole else None, record.attributes, record.shape,
        )  # fmt: skip

    return Item(name, nbytes, load)


def moment_of(record: Record) -> Moment:
    """Return the moment of a record."""
    return Moment(*(getattr(record, name) for name in Moment.__struct_fields__))


def _fail(error: StoreError) -> NoReturn:
    raise error


def items_of_files(root: Path, tests: Sequence[Test], layer_base: int) -> Items:
    """Return the tensor files below `root`. Loading a file makes the same checks as an import.

    Args:
        root: The directory.
        tests: Tests on keys. A file is tested when it is loaded.
        layer_base: The number of the first layer in files that capd did not write.

    Raises:
        OSError: If `root` cannot be read.
    """
    files = find_files(root)
    load = partial(_load_file, tests=tests, layer_base=layer_base)
    return Items(len(files), (Item(file_name(file), file.nbytes, partial(load, file)) for file in files))


def _load_file(file: TensorFile, tests: Sequence[Test], layer_base: int) -> Loaded | None:
    record = load_file(file, layer_base).record
    capture = record.capture
    if not all(test(capture.key) for test in tests):
        return None
    # The file's own statistics do not merge (docs/migration-files.md), and the elements are in memory already.
    stats = public(summarise(record.bits, record.dtype))
    return Loaded(
        capture.key, capture.moment, record.dtype, record.bits.nbytes, stats, lambda: record.bits,
        shape=record.bits.shape,
    )  # fmt: skip


def file_name(file: TensorFile) -> str:
    """Return the name of a file in messages."""
    return printable(os.fsencode(file.path).decode(errors="replace"))
