"""The records of a series: what is known of one capture, and its elements on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from capd.store.arrays.region import Region
from capd.store.format.dtypes import to_values
from capd.store.format.packed_statistics import unpack
from capd.store.format.statistics import Stats, public, summarise
from capd.store.read.notebook import record_html

if TYPE_CHECKING:
    import torch

__all__ = ["Record", "Records"]


class RecordSource(Protocol):
    """The series that reads the elements of its records."""

    @property
    def path(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kept(self) -> str: ...
    @property
    def numbers(self) -> Sequence[int]: ...
    def number(self, i: SupportsIndex) -> int: ...
    def record(self, number: int) -> Record: ...
    def read(self, number: int, region: Region = ...) -> NDArray[np.generic]: ...
    def elements(self, number: int, region: Region = ...) -> NDArray[np.generic]: ...
    def errors(self, number: int) -> dict[str, Any]: ...
    def tensor(self, number: int, region: Region = ..., *, dequantise: bool = False) -> torch.Tensor: ...
    def __len__(self) -> int: ...


@dataclass(slots=True)
class Record:
    """One committed capture. index: its number in the series' array. shape: its true shape, for cropping."""

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
    _series: RecordSource = field(repr=False)
    _stats: Stats | None = field(repr=False)

    @property
    def committed_stats(self) -> Stats | None:
        """The committed statistics; None for a record without them. Reads no element."""
        return self._stats

    @property
    def stats(self) -> Stats:
        """The committed statistics. If the record has none, they are computed from its elements."""
        if self._stats is None:
            bits, dtype = self._series.read(self.index), self._series.dtype
            known = unpack if self._series.kept == "statistics" else summarise
            self._stats = public(known(bits, dtype))
        return self._stats

    @property
    def errors(self) -> dict[str, Any]:
        """The `capd.analyze.errors.Errors` of each format that was measured while capturing, by its label.

        Empty if the record was not measured (docs/lab.md).
        """
        return self._series.errors(self.index)

    def numpy(self, region: Region = ...) -> NDArray[np.generic]:
        """Return the stored bits, as `Series.numpy`."""
        return self._series.elements(self.index, region)

    def values(self, region: Region = ...) -> NDArray[np.generic]:
        """Return the numbers, as `Series.values`."""
        return to_values(self.numpy(region), self._series.dtype)

    def torch(self, region: Region = ..., *, dequantise: bool = False) -> torch.Tensor:
        """Return a CPU tensor of the captured dtype, as `Series.torch`."""
        return self._series.tensor(self.index, region, dequantise=dequantise)

    def _repr_html_(self) -> str:
        return record_html(self._series.path, self)


class Records(Sequence[Record]):
    """The records of a series in capture order, read on access. A slice is a list."""

    def __init__(self, series: RecordSource) -> None:
        self._series = series

    def __len__(self) -> int:
        return len(self._series)

    @overload
    def __getitem__(self, i: SupportsIndex) -> Record: ...

    @overload
    def __getitem__(self, i: slice) -> list[Record]: ...

    def __getitem__(self, i: SupportsIndex | slice) -> Record | list[Record]:
        if isinstance(i, slice):
            return [self._series.record(number) for number in self._series.numbers[i]]
        return self._series.record(self._series.number(i))

    def __repr__(self) -> str:
        return f"<{len(self)} records of {self._series.path}>"
