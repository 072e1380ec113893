"""Records of runs, or of a directory of tensor_saver's files, as items to look at.

An item is found without reading it. `load` returns its description, and `read` returns its elements. Both may be called
in another thread than the one that found the item.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError, StoreError
from capd.io.sample import places_of
from capd.lab.sampling import SOURCE_DTYPES, is_in_sample, parse_sample
from capd.pt_files.files import TensorFile, find_files
from capd.pt_files.import_ import load_file
from capd.store.format.statistics import Stats, public, summarise
from capd.store.objects.address import RunPlace
from capd.store.read.series import Series
from capd.store.read.store import open_store
from capd_client.process.text import printable
from capd_client.protocol.dtypes import ITEM_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.statistics_row import ROW_VALUES

__all__ = [
    "UNREADABLE",
    "Item",
    "Items",
    "Loaded",
    "NamedSeries",
    "Skipped",
    "SourcePlace",
    "Test",
    "items_of",
    "items_of_files",
    "items_of_runs",
    "items_of_series",
    "items_within",
    "skipped",
]  # fmt: skip

UNREADABLE = (CapdError, OSError, RuntimeError, MemoryError)
"""The errors of a record that is damaged or foreign, or for which torch lacks memory."""
Test = Callable[[Key], bool]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded item.

    Attributes:
        raw_bytes: The kept bytes of the item.
        stats: The statistics, None if they are unknown before the elements are read.
        read: Returns the stored elements. None if only statistics were kept.
        attributes, metadata: The record's, as in `Record`.
        errors: Returns the errors of formats that were measured while capturing, by label.
        error_sample: The share of calls that were to be measured then, such as "1/8"; None if nothing says so.
    """

    key: Key
    moment: Moment
    dtype: str
    raw_bytes: int
    stats: Stats | None
    read: Callable[[], NDArray[np.generic]] | None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    errors: Callable[[], Mapping[str, Any]] | None = None
    error_sample: str | None = None

    @property
    def no_source(self) -> str | None:
        """The reason why no format can be measured on the item. None for complete high-precision values."""
        return "only its statistics were kept" if self.read is None else self.no_high_precision

    @property
    def is_outside_sample(self) -> bool:
        """Whether the errors of the item were not to be measured while capturing."""
        return self.error_sample is not None and not is_in_sample(
            self.moment, parse_sample(self.error_sample)
        )

    @property
    def no_high_precision(self) -> str | None:
        """The reason why no format applies to the tensor that the item is of; None if its values are the source."""
        if "tensor_class" in self.attributes:
            return f"it is a part of a quantised tensor ({printable(str(self.attributes['tensor_class'])[:200])})"
        if self.dtype not in SOURCE_DTYPES:
            return f"{self.dtype} is no high-precision source; these are {', '.join(SOURCE_DTYPES)}"
        return None


class SourcePlace(NamedTuple):
    """The place of a record in its source: the number of its key and dtype, and of the record among theirs."""

    series: int
    record: int


@dataclass(frozen=True, slots=True)
class Item:
    """An item. `load`, `read` and `Loaded.read` raise UNREADABLE.

    Attributes:
        name: The name in messages.
        nbytes: The memory that the item takes after it is read.
        load: Returns the loaded item, None if the selection leaves it out.
        read: Returns the stored elements, and keeps nothing in memory until then. None if only statistics were kept.
        is_sampled: Whether its elements are to be read (`capd.io.sample`). Its statistics always are.
        place: Its place in its source, None for a file.
        reference: The run, the node, the path of the series and the number of the record; None for a file.
    """

    name: str
    nbytes: int
    load: Callable[[], Loaded | None]
    read: Callable[[], NDArray[np.generic]] | None = None
    is_sampled: bool = True
    place: SourcePlace | None = None
    reference: tuple[str, str, str, int] | None = None


class Skipped(NamedTuple):
    """A record or file that could not be read, and the reason. `damaged`: whether it is known to be in a run."""

    name: str
    reason: str
    damaged: bool = False


def skipped(name: str, error: BaseException, *, damaged: bool = False) -> Skipped:
    """Return the reason why something cannot be read, in one short line."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return Skipped(name, printable(reason[:500]), damaged)


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a source.

    Attributes:
        total: Their number.
        found: Makes each on request, as a run may have millions.
        series: The series of runs that they are the records of, in order; None for files.
    """

    total: int
    found: Iterable[Item]
    series: Sequence[NamedSeries] | None = None


@dataclass(frozen=True, slots=True)
class NamedSeries:
    """A series of a source.

    Attributes:
        name: The name in messages.
        numbers: The numbers of its records in the array, or the reason why they cannot be read.
        turn: The number of the series within its source, which decides what a sample takes (`places_of`).
        first: The place of its first record.
        label: The name of the run before the quant type, or "" (`capd.io.beside`).
    """

    name: str
    series: Series
    numbers: Sequence[int] | StoreError
    turn: int
    first: SourcePlace
    label: str = ""


def items_of_runs(
    paths: Sequence[RunPlace], tests: Sequence[Test], share: float = 1.0, attempt: int | str = "latest"
) -> Items:
    """Return the records of runs whose keys pass all tests, series by series.

    Args:
        paths: The runs, on this machine or in an object store.
        tests: The tests of keys.
        share: The share of each series to sample.
        attempt: As in `Store.find`: of records that share a moment, "latest" keeps only the newest.

    Raises:
        NotAStore: If a path is no run.
        StoreError: If a run cannot be opened.
    """
    named = (
        (f"{path}/{one.path}" if len(paths) > 1 else one.path, one)
        for path in paths
        for one in open_store(path).find(attempt=attempt)
        if all(test(one.key) for test in tests)
    )
    return items_of_series(named, share)


def items_of_series(named: Iterable[tuple[str, Series]], share: float = 1.0) -> Items:
    """Return the records of series, each with the name that messages give it. `share` of them are sampled."""
    places: dict[tuple[Key, str], SourcePlace] = {}
    series = []
    for turn, (name, one) in enumerate(named):
        numbers, identity = _numbers(one), (one.key, one.dtype)
        place = places.setdefault(identity, SourcePlace(len(places), 0))
        series.append(NamedSeries(name, one, numbers, turn, place))
        places[identity] = place._replace(record=place.record + _records(numbers))
    return items_within(series, share)


def items_within(series: Sequence[NamedSeries], share: float = 1.0) -> Items:
    """Return the records of series of a source. `share` of them are sampled."""
    total = sum(1 if isinstance(one.numbers, StoreError) else len(one.numbers) for one in series)
    return Items(total, chain.from_iterable(items_of(one, share) for one in series), series)


def items_of(named: NamedSeries, share: float, first: int = 0, last: int | None = None) -> Iterator[Item]:
    """Yield the records of a series from one place to another. A series that cannot be read is one item."""
    numbers, name = named.numbers, named.name
    if isinstance(numbers, StoreError):
        yield _unreadable(name, numbers)
        return
    sampled = None if share >= 1 else places_of(len(numbers), share, named.turn)
    for at in range(first, len(numbers) if last is None else last):
        item = _item(f"{name}#{numbers[at]}", named.series, numbers[at])
        place = named.first._replace(record=named.first.record + at)
        yield replace(item, place=place, is_sampled=sampled is None or at in sampled)


def _records(numbers: Sequence[int] | StoreError) -> int:
    return 0 if isinstance(numbers, StoreError) else len(numbers)


def _numbers(series: Series) -> Sequence[int] | StoreError:
    try:
        return series.numbers
    except StoreError as error:
        return error


def _item(name: str, series: Series, number: int) -> Item:
    try:
        record = series.record(number)
    except StoreError as error:
        return _unreadable(name, error)
    read = partial(series.read, number) if series.kept == "tensor" else None
    nbytes = prod(record.shape) * ITEM_NBYTES[series.dtype] if read else 8 * ROW_VALUES

    def load() -> Loaded:
        moment = Moment(*(getattr(record, name) for name in Moment.__struct_fields__))
        stats = record.committed_stats if read else record.stats
        return Loaded(
            series.key,
            moment,
            series.dtype,
            nbytes,
            stats,
            read,
            record.attributes,
            record.shape,
            record.metadata,
            errors=lambda: record.errors,
            error_sample=series.error_sample,
        )

    reference = (str(series.run), series.node, series.path, number)
    return Item(name, nbytes, load, read, reference=reference)


def _unreadable(name: str, error: StoreError) -> Item:
    def fail() -> NoReturn:
        raise error

    return Item(name, 0, fail, fail)


def items_of_files(root: Path, tests: Sequence[Test], layer_base: int, *, statistics: bool = True) -> Items:
    """Return the tensor files below `root` whose keys pass all tests. Loading a file makes the checks of an import.

    A file is tested when it is loaded. `layer_base` is the number of the first layer in files that capd did not write.
    Without `statistics`, loading a file does not compute them.

    Raises:
        OSError: If `root` cannot be read.
    """

    def item(file: TensorFile) -> Item:
        name = printable(os.fsencode(file.path).decode(errors="replace"))
        load = partial(_load_file, file, tests, layer_base, statistics)
        return Item(name, file.nbytes, load, lambda: load_file(file, layer_base).bits)

    files = find_files(root)
    return Items(len(files), map(item, files))


def _load_file(file: TensorFile, tests: Sequence[Test], layer_base: int, statistics: bool) -> Loaded | None:
    record = load_file(file, layer_base)
    capture, bits = record.capture, record.bits
    if not all(test(capture.key) for test in tests):
        return None
    # The file's own statistics do not merge (docs/migration-files.md), and the elements are in memory already.
    stats = public(summarise(bits, record.dtype)) if statistics else None
    return Loaded(
        capture.key, capture.moment, record.dtype, bits.nbytes, stats, lambda: bits, shape=bits.shape
    )
