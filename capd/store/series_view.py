"""Series and records as users read them; see `capd.store.reader` for the Store that finds them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError
from capd.store.catalog_read import SeriesRow
from capd.store.dtypes import to_values
from capd.store.frames import RecordRow
from capd.store.node import NodeView
from capd.store.records import RecordReader
from capd.store.statistics import Stats, public, summarise
from capd_client.key import Key, Moment

if TYPE_CHECKING:
    import torch

__all__ = ["Record", "Series", "import_extra"]


@dataclass(slots=True)
class Record:
    """One committed capture. index: its number in the series' array; shape: its true shape, to crop by."""

    index: int
    iteration: int
    micro_batch: int
    call: int
    sample_idx: int | None
    batch_idx: int | None
    sequence_idx: int | None
    attempt: int
    time_ns: int
    recompute: bool
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    is_leaf: bool
    metadata: dict[str, Any]
    attributes: dict[str, Any]
    sealed: bool
    _series: Series = field(repr=False)
    _stats: Stats | None = field(repr=False)

    @property
    def stats(self) -> Stats:
        """Statistics as committed; for a record too new to have them, computed from its elements."""
        if self._stats is None:
            bits = self._series.read(self.index)
            self._stats = public(summarise(bits, self._series.dtype))
        return self._stats


class Series:
    """All records of one key and dtype (and, where shapes outgrew the first, of one variant): one Zarr array."""

    def __init__(self, run: Path, node: NodeView, row: SeriesRow, attempt: int | str = "all") -> None:
        self._run, self._node, self._row, self._attempt = run, node, row, attempt
        self._reader = RecordReader(run, node, row.header)

    @property
    def key(self) -> Key:
        """What the tensor is."""
        return self._row.header.key

    @property
    def dtype(self) -> str:
        """The captured torch dtype's name, e.g. "bfloat16"."""
        return self._row.header.dtype

    @property
    def path(self) -> str:
        """Path of the series' group below the run."""
        return self._row.header.path

    @property
    def attributes(self) -> dict[str, Any]:
        """What is constant for the series beside its key (layout, cast_from, …)."""
        return self._row.header.attributes

    @property
    def shape(self) -> tuple[int, ...]:
        """[records, *largest record shape]."""
        return (len(self), *self._row.max_shape)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the elements, uncompressed."""
        return self._row.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes in shard files."""
        return self._row.stored_bytes

    @cached_property
    def _rows(self) -> dict[int, RecordRow]:
        rows = self._node.records(self.path)
        if self._attempt == "all":
            return rows
        if self._attempt == "latest":
            return dict(_latest(rows.items()))
        return {number: row for number, row in rows.items() if row.moment.attempt == self._attempt}

    @cached_property
    def records(self) -> list[Record]:
        """The records in capture order."""
        return [self._record(number, row) for number, row in self._rows.items()]

    def _record(self, number: int, row: RecordRow) -> Record:
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

    def __len__(self) -> int:
        return self._row.records if self._attempt == "all" else len(self._rows)

    def __repr__(self) -> str:
        return f"<Series {self.path} {self.dtype} {list(self.shape)}>"

    def read(self, number: int) -> NDArray[np.generic]:
        """Stored bits of the record with this number in the array."""
        return self._reader.read(number, self._rows[number])

    def numpy(self, i: int) -> NDArray[np.generic]:
        """Stored bits of record `i`, in its true shape: uint16 for bfloat16, uint8 for 8-bit floats and packed fp4,
        the native dtype otherwise. Raises DamagedRecord rather than return a wrong element."""
        return self.read(self.records[i].index)

    def values(self, i: int) -> NDArray[np.generic]:
        """Numbers of record `i`: float32 for formats stored as bits (exact; fp4 unpacked), else as `numpy`."""
        return to_values(self.numpy(i), self.dtype)

    def torch(self, i: int) -> torch.Tensor:
        """Record `i` as a CPU tensor of the captured dtype, bit for bit."""
        import torch

        bits, dtype = self.numpy(i), getattr(torch, self.dtype)
        if bits.size == 0:  # numpy gives empty arrays strides that torch refuses to view
            return torch.empty(bits.shape, dtype=dtype)
        return torch.from_numpy(np.array(bits, order="C")).view(
            dtype
        )  # a copy: torch expects writable memory

    def zarr(self) -> Any:
        """The sealed records as a read-only zarr.Array [record, *shape] of stored bits."""
        import zarr

        return zarr.open_array(self._run / self.path / "data", mode="r")

    def dask(self) -> Any:
        """The sealed records as a dask array of stored bits, one block per shard. Needs the extra `distributed`."""
        array = self.zarr()
        da = import_extra("dask.array", "distributed")
        return da.from_array(array, chunks=array.shards or array.chunks)

    def xarray(self) -> Any:
        """The sealed records as an xarray.DataArray of stored bits with the moments as coordinates on `record`.

        Needs the extra `distributed`.
        """
        xr = import_extra("xarray", "distributed")
        data = xr.open_zarr(self._run / self.path, consolidated=False, chunks=None)["data"]
        sealed = Series(self._run, self._node, self._row).records[: data.sizes["record"]]
        columns = {name: [getattr(r, name) for r in sealed] for name in Moment.__struct_fields__}
        known = {name: values for name, values in columns.items() if None not in values}
        return data.assign_coords({name: ("record", values) for name, values in known.items()})


def _latest(rows: Iterable[tuple[int, RecordRow]]) -> Iterator[tuple[int, RecordRow]]:
    """Of records at one moment, those of the latest attempt of the job."""
    rows = list(rows)
    newest: dict[tuple[object, ...], int] = {}
    for _, row in rows:
        moment = _without_attempt(row.moment)
        newest[moment] = max(newest.get(moment, 0), row.moment.attempt)
    return ((n, row) for n, row in rows if row.moment.attempt == newest[_without_attempt(row.moment)])


def _without_attempt(m: Moment) -> tuple[object, ...]:
    return (m.iteration, m.micro_batch, m.call, m.sample_idx, m.batch_idx, m.sequence_idx, m.recompute)


def import_extra(module: str, extra: str) -> Any:
    """Import a module that an extra installs; raises CapdError naming the extra where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CapdError(f'this needs {module.split(".")[0]}: pip install "capd[{extra}]"') from error
