"""The series and records that users read. `capd.store.read.store` has the Store that finds them."""

from __future__ import annotations

import importlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError, NoSuchRecord
from capd.store.arrays.lazy import LazyArray, StoredRecords
from capd.store.arrays.region import Region
from capd.store.catalog.rows import SeriesRow
from capd.store.format.codecs import Encoded
from capd.store.format.dtypes import kept_of, stored_type, to_values
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.statistics import public
from capd.store.measured.error_rows import ErrorRows, error_series
from capd.store.objects.address import RunPlace
from capd.store.quantised.dequantise import dequantised
from capd.store.quantised.parts import ATTRIBUTES
from capd.store.read.elements import ReadTools, RecordReader
from capd.store.read.notebook import series_html
from capd.store.read.record import Record, Records
from capd.store.read.reopened import reopened_node
from capd.store.read.rows import NewestAttempts, SeriesRows
from capd.store.read.source import RunNode
from capd.store.remote.node import RemoteNode
from capd.store.scan.shown_array import check_array
from capd_client.protocol.key import Key, Moment

if TYPE_CHECKING:
    import torch

__all__ = ["Record", "Records", "Series", "import_extra", "tensor_of"]


class Series:
    """All records of one key and dtype: one Zarr array. Records too large for a series form another variant of it.

    It is a sequence of its records. An index `i` counts the records of this view, which `Store.find` may have
    restricted to one attempt. A `region` is numpy basic indexing with positive steps in the stored record. Only its
    chunks are read.

    A series whose `kept` is "statistics" has no elements. Methods that return elements raise CapdError, and `zarr` has
    one statistics row per record.
    """

    def __init__(
        self,
        node: RunNode,
        row: SeriesRow,
        tools: ReadTools,
        attempt: int | str = "all",
        newest: NewestAttempts | None = None,
    ) -> None:
        self._node, self._row, self._tools, self._attempt, self._newest = node, row, tools, attempt, newest

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the run itself: it may be on another machine, which sees the same path or address.
        node = self._node
        named = str(node.run if isinstance(node, RemoteNode) else node.run.absolute())
        newest = None if self._newest is None else self._newest.places
        # A run that grows may have been opened there before it had these errors.
        errors = {row.header.path: row.records for row in error_series(node, self._row.header)}
        return _reopened, (named, self._node.name, self._row, self._attempt, newest, errors)

    def fresh(self) -> Series:
        """Return the same series with empty caches. Everything read through it is freed together with it."""
        return Series(self._node, self._row, self._tools, self._attempt, self._newest)

    @cached_property
    def _rows(self) -> SeriesRows:
        return SeriesRows(self._node, self._row, self._attempt, self._newest)

    @cached_property
    def _reader(self) -> RecordReader:
        return RecordReader(self._node, self._row.header, self._tools)

    @property
    def node(self) -> str:
        """The name of the node that wrote the series; "" if its catalog is missing."""
        return self._node.name

    @property
    def run(self) -> RunPlace:
        """The run that has the series."""
        return self._node.run

    @property
    def header(self) -> SeriesHeader:
        """The description of the series as the writer keeps it."""
        return self._row.header

    @property
    def is_sealed(self) -> bool:
        """Whether plain Zarr readers see all records of the series."""
        return self._row.sealed == self._row.records

    def row(self, number: int) -> RecordRow:
        """Return the description of the record with this number in the array. Raises DamagedRecord."""
        return self._rows.row(number)

    def encoded(self, number: int) -> list[tuple[int, Encoded]]:
        """Return the chunks of the record with this number in the array, as they are stored, with their ordinals.

        Raises:
            DamagedRecord: A chunk cannot be read exactly, or is shared with other records.
        """
        return self._reader.encoded(number, self._rows.id(number))

    def of_attempt(self, attempt: int | str) -> Series:
        """Return the same series with the records that `Store.find` keeps for this `attempt`."""
        return Series(self._node, self._row, self._tools, attempt, self._newest)

    @property
    def key(self) -> Key:
        """The key of the tensor."""
        return self._row.header.key

    @property
    def dtype(self) -> str:
        """The name of the captured torch dtype, for example "bfloat16"."""
        return stored_type(self._row.header.dtype).torch

    @property
    def kept(self) -> str:
        """The stored part of each capture: "tensor", only "statistics", or "errors" of formats (docs/lab.md)."""
        return kept_of(self._row.header.dtype)

    @property
    def path(self) -> str:
        """The path of the series' group in the run."""
        return self._row.header.path

    @property
    def attributes(self) -> dict[str, Any]:
        """The constants of the series that are not in its key (layout, cast_from, …)."""
        return self._row.header.attributes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [records, *largest record shape] of the tensors."""
        return (len(self), *self._row.max_shape)

    @property
    def raw_bytes(self) -> int:
        """The elements of the records in bytes, uncompressed."""
        if self._has_all:
            return self._row.raw_bytes
        return sum(self._rows.id(number).nbytes for number in self.numbers)

    @property
    def stored_bytes(self) -> int:
        """The bytes of the records in shard files. Those of one attempt are counted by the share of each record."""
        if self._has_all:
            return self._row.stored_bytes
        return self._node.stored_nbytes(self.path, self.numbers)

    @property
    def _has_all(self) -> bool:
        return len(self) == self._row.records

    @property
    def records(self) -> Sequence[Record]:
        """The records in capture order."""
        return Records(self)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the records in the array, in capture order."""
        return self._rows.numbers

    @property
    def moments(self) -> list[Moment]:
        """The moments of the records, in capture order."""
        return [self._rows.id(number).moment for number in self.numbers]

    @cached_property
    def _siblings(self) -> Sequence[Series]:
        """The series of the same module, rank and operation, with this one. The parts of one tensor are siblings."""
        own = _without_names(self.key)
        return [
            Series(self._node, row, self._tools, self._attempt)
            for row in self._node.series.values()
            if row.records and _without_names(row.header.key) == own
        ]

    @cached_property
    def _error_rows(self) -> ErrorRows:
        found = error_series(self._node, self._row.header)
        return ErrorRows([Series(self._node, row, self._tools) for row in found])

    def errors(self, number: int) -> dict[str, Any]:
        """Return the errors of formats on the record with this number in the array, as `Record.errors`.

        Raises:
            CapdError: They cannot be read.
        """
        if not self._error_rows:
            return {}
        # The numbers are of a floor above the store, as the modules of extras are.
        stored = importlib.import_module("capd.lab.stored_errors")
        found: dict[str, Any] = stored.errors_among(
            self._error_rows.payloads(self._rows.id(number).moment), self._rows.id(number)
        )
        return found

    @property
    def error_sample(self) -> str | None:
        """The share of calls whose errors were measured while capturing, such as "1/8"; None without any."""
        return self._error_rows.sample if self._error_rows else None

    def record(self, number: int) -> Record:
        """Return the record with this number in the array."""
        row = self._rows.row(number)
        return Record(
            number,
            **msgspec.structs.asdict(row.moment),
            shape=row.shape,
            device=row.device,
            requires_grad=row.requires_grad,
            is_leaf=row.is_leaf,
            metadata=json.loads(row.metadata) if row.metadata else {},
            attributes=json.loads(row.attributes) if row.attributes else self.attributes,
            sealed=number < self._row.sealed,
            _series=self,
            _stats=None if row.stats is None else public(row.stats),
        )

    def number(self, i: SupportsIndex) -> int:
        """Return the number in the array of record `i` of this view.

        Raises:
            NoSuchRecord: The view has no such record.
        """
        at = operator.index(i)
        try:
            return self.numbers[at]
        except IndexError:
            last = f"; the last is {len(self) - 1}" if len(self) else ""
            raise NoSuchRecord(f"{self.path}: there is no record {at} of {len(self)}{last}") from None

    def __len__(self) -> int:
        return self._row.records if self._attempt == "all" else len(self.numbers)

    @overload
    def __getitem__(self, i: SupportsIndex) -> Record: ...

    @overload
    def __getitem__(self, i: slice) -> list[Record]: ...

    def __getitem__(self, i: SupportsIndex | slice) -> Record | list[Record]:
        return Records(self)[i]

    def __iter__(self) -> Iterator[Record]:
        return (self.record(number) for number in self.numbers)

    def __repr__(self) -> str:
        only = "" if self.kept == "tensor" else f" {self.kept}"
        return f"<Series {self.path} {self.dtype} {list(self.shape)}{only}>"

    def _must_have_elements(self) -> None:
        if self.kept == "errors":
            raise CapdError(f"{self.path}: it holds errors of formats, no elements; read `record.errors`")
        if self.kept == "statistics":
            raise CapdError(
                f"{self.path}: only statistics were kept (mode or policy stats), no elements; read "
                "`records[i].stats`, or the rows in `zarr()`"
            )

    def read(self, number: int, region: Region = ...) -> NDArray[np.generic]:
        """Return the stored bits of the record with this number in the array, or its statistics row."""
        return self._reader.read(number, self._rows.id(number), region)

    def numpy(self, i: SupportsIndex, region: Region = ...) -> NDArray[np.generic]:
        """Return the stored bits of record `i` in its true shape.

        Args:
            i: The index of the record in this view.
            region: The part of the record to read.

        Returns:
            A new, writable array: uint16 for bfloat16, uint8 for 8-bit floats and packed fp4, otherwise the native
            dtype.

        Raises:
            DamagedRecord: An element cannot be read exactly.
            CapdError: `region` is not a valid region, or the series has only statistics.
        """
        return self.elements(self.number(i), region)

    def elements(self, number: int, region: Region = ...) -> NDArray[np.generic]:
        """Return the stored bits of the record with this number in the array, as `numpy`."""
        self._must_have_elements()
        return self.read(number, region)

    def values(self, i: SupportsIndex, region: Region = ...) -> NDArray[np.generic]:
        """Return the numbers of record `i`: float32 (exact) for formats stored as bits, otherwise as `numpy`.

        Packed fp4 is unpacked: the last axis of the result is twice as long. A region counts packed bytes.

        Raises:
            DamagedRecord: An element cannot be read exactly.
            CapdError: `region` is not a valid region, or the series has only statistics.
        """
        return to_values(self.numpy(i, region), self.dtype)

    def tensor(self, number: int, region: Region = ..., *, dequantise: bool = False) -> torch.Tensor:
        """Return the record with this number in the array as a CPU tensor, as `torch`."""
        attributes = self.record(number).attributes if dequantise else {}
        if "tensor_class" not in attributes:
            return tensor_of(self.elements(number, region), self.dtype)
        import torch

        where, name = f"{self.path}#{number}", self.key.tensor_name
        values, dtype = dequantised(where, name, attributes, partial(self._captured_with, number))
        return torch.from_numpy(values[region].copy()).to(getattr(torch, dtype))

    def torch(self, i: SupportsIndex, region: Region = ..., *, dequantise: bool = False) -> torch.Tensor:
        """Return record `i` as a CPU tensor of the captured dtype, bit for bit, with its own memory.

        Args:
            i: The index of the record in this view.
            region: The part of the record to read.
            dequantise: For a part of a quantised tensor (docs/frameworks.md), return the values of the whole tensor.
                They have the shape and dtype that the job saw, and are computed in float32. Other records ignore it.

        Raises:
            DamagedRecord: An element cannot be read exactly.
            CapdError: `region` is not a valid region, or the series has only statistics. With `dequantise`: the
                class of the tensor is unknown, or another of its parts was not kept.
        """
        return self.tensor(self.number(i), region, dequantise=dequantise)

    def _captured_with(self, number: int, tensor_name: str) -> tuple[NDArray[np.generic], str] | None:
        """Return the bits and the dtype of another part of a record's tensor; None if it was not captured with it."""
        attributes, moment = self.record(number).attributes, self._rows.row(number).moment
        candidates = [one for one in self._siblings if one.key.tensor_name == tensor_name]
        # Prefer the same label, but do not require it: labels of dtypes differ by part.
        candidates.sort(key=lambda one: one.key.quant_type != self.key.quant_type)
        for one in candidates:
            first = [number] if number in one.numbers else []
            for other in (*first, *one.numbers):
                if one._rows.row(other).moment != moment:
                    continue
                said = one.record(other).attributes
                if all(said.get(name) == attributes.get(name) for name in ATTRIBUTES):
                    one._must_have_elements()
                    return one.read(other), one.dtype
        return None

    def stack(
        self, records: slice = slice(None), region: Region = ..., *, bits: bool = False
    ) -> NDArray[np.generic]:
        """Return the numbers of several records of one shape, as [records, *region], as `values`.

        Args:
            records: The records by their indexes in this view.
            region: The part to read from each record.
            bits: Return the stored bits, as `numpy`.

        Raises:
            DamagedRecord: An element cannot be read exactly.
            CapdError: The shapes differ, `region` is not a valid region, or the series has only statistics.
        """
        self._must_have_elements()
        chosen = [(number, self._rows.id(number)) for number in self.numbers[records]]
        found = self._reader.stack(chosen, region)
        return found if bits else to_values(found, self.dtype)

    def zarr(self) -> Any:
        """Return the sealed records as a read-only zarr.Array [record, *shape] of stored bits or statistics rows.

        Raises:
            DamagedRecord: The metadata of the array contradict the series.
        """
        if isinstance(self._node, RemoteNode):
            return self._node.array(self._row.header)
        import zarr

        check_array(self._node.run, self._row.header)
        return zarr.open_array(self._node.run / self.path / "data", mode="r")

    def lazy(self, *, bits: bool = False) -> LazyArray:
        """Return the records of this view as a lazy array [record, *largest record shape]: numbers, or stored bits.

        Raises:
            CapdError: The series has only statistics.
        """
        self._must_have_elements()
        records = StoredRecords(self.numbers, self._shape_of, self.read, self._ahead)
        return LazyArray(self._row.header.dtype, self._row.max_shape, records, bits=bits)

    def _ahead(self, numbers: Sequence[int]) -> None:
        if isinstance(self._node, RemoteNode):
            self._reader.prepare([(number, self._rows.id(number)) for number in numbers])

    def _shape_of(self, number: int) -> tuple[int, ...]:
        return self._rows.id(number).shape

    def dask(self, *, bits: bool = False) -> Any:
        """Return the records of this view as a dask array of numbers, one block per shard. Nothing is read yet.

        The array is the one of `xarray`.

        Raises:
            CapdError: The extra `distributed` is not installed, or the series has only statistics.
        """
        array = self.lazy(bits=bits)
        da = import_extra("dask.array", "distributed")
        blocks = (self._row.header.geometry.shard_records, *(max(n, 1) for n in array.shape[1:]))
        # Without a name, dask would hash the elements.
        return da.from_array(
            array, chunks=blocks, name=False, asarray=False, meta=np.empty((0,), array.dtype)
        )

    def xarray(self, *, bits: bool = False) -> Any:
        """Return the records of this view as an xarray.DataArray of numbers. Nothing is read yet.

        Formats that are stored as bits become float32, which is exact; packed fp4 is unpacked. If the records differ in
        shape, each is followed by NaN, or by 0 if the dtype has no NaN. The axes of linear and attention operands have
        names. The fields of the moments are coordinates of `record`; `time` is a datetime64. The attrs are the key and
        the attributes of the series, such as `emulation`.

        Args:
            bits: Return the stored bits: uint16 for bfloat16, uint8 for 8-bit floats and packed fp4.

        Raises:
            CapdError: The extra `distributed` is not installed, or the series has only statistics.
        """
        array = self.lazy(bits=bits)
        import_extra("xarray", "distributed")
        from capd.store.arrays.labelled import labelled

        attributes = {**self.attributes, "dtype": self.dtype, "path": self.path}
        return labelled(array, self.key, attributes, self.numbers, self.moments)

    def _repr_html_(self) -> str:
        return series_html(self)


def _reopened(
    place: str,
    node: str,
    row: SeriesRow,
    attempt: int | str,
    newest: Sequence[tuple[str, SeriesRow]] | None,
    errors: Mapping[str, int],
) -> Series:
    """Return a series that another process named, through a run that this process opened. errors: as that one saw."""
    part, tools = reopened_node(place, node, {row.header.path: row.records, **errors})
    rows = None
    if newest is not None:
        rows = NewestAttempts(
            (reopened_node(place, name, {one.header.path: one.records})[0], one) for name, one in newest
        )
    return Series(part, row, tools, attempt, rows)


def _without_names(key: Key) -> Key:
    return msgspec.structs.replace(key, tensor_name="", quant_type="")


def tensor_of(bits: NDArray[np.generic], dtype: str) -> torch.Tensor:
    """Return stored bits as a CPU tensor of the named torch dtype. The tensor shares their memory."""
    import torch

    kind = getattr(torch, dtype)
    # torch refuses to view the strides of numpy's empty arrays.
    if bits.size == 0:
        return torch.empty(bits.shape, dtype=kind)
    return torch.from_numpy(bits).view(kind)


def import_extra(module: str, extra: str) -> Any:
    """Import a module that an extra installs.

    Raises:
        CapdError: The module is missing. The message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CapdError(f'this needs {module.split(".")[0]}: pip install "capd[{extra}]"') from error
