"""The lazy array of a series: an index reads the records that it names, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.store.arrays.region import Region, select
from capd.store.format.dtypes import stored_type, to_values

__all__ = ["LazyArray", "StoredRecords"]

_PACKED = "float4_e2m1fn_x2"


class StoredRecords(NamedTuple):
    """The records of a lazy array.

    numbers: their numbers. shape: returns the shape of one. read: reads a region of stored bits of one. ahead: is told
    which whole records will be read.
    """

    numbers: Sequence[int]
    shape: Callable[[int], tuple[int, ...]]
    read: Callable[[int, Region], NDArray[np.generic]]
    ahead: Callable[[Sequence[int]], None]


class LazyArray:
    """The array [record, *largest record shape] of a series: its numbers, or its stored bits.

    A record that is smaller than the largest is followed by NaN, or by 0 if the dtype has no NaN. An index is numpy's
    basic indexing with positive steps. Packed fp4 has two numbers for each stored byte of its last axis.

    Attributes:
        shape: The shape.
        dtype: The numpy dtype: float32 (exact) for numbers that are stored as bits, otherwise the stored one.
    """

    def __init__(self, name: str, largest: tuple[int, ...], records: StoredRecords, *, bits: bool) -> None:
        """Describe the array. `name`: the dtype of the series. `largest`: the largest record shape."""
        stored = stored_type(name)
        self._name, self._records, self._as_bits = name, records, bits or stored.encoding != "bits"
        self._is_packed = name == _PACKED and not bits
        self.dtype: np.dtype[np.generic] = stored.stored if self._as_bits else np.dtype("float32")
        self.shape = (len(records.numbers), *self._unpacked(largest))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def _unpacked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not self._is_packed:
            return shape
        return (*shape[:-1], 2 * shape[-1]) if shape else (2,)

    def __getitem__(self, index: Region) -> NDArray[np.generic]:
        """Read a region as a new array.

        Raises:
            DamagedRecord: An element cannot be read exactly.
            CapdError: The index is not a valid region.
        """
        selection = select(index, self.shape)
        of_records, *axes = selection.axes
        padding = np.nan if self.dtype.kind in "fc" else 0
        out = np.full(selection.extents, padding, self.dtype)
        if all(len(axis) == extent for axis, extent in zip(axes, self.shape[1:], strict=True)):
            self._records.ahead([self._records.numbers[i] for i in of_records])
        for at, i in enumerate(of_records):
            number = self._records.numbers[i]
            shape = self._unpacked(self._records.shape(number))
            within = [range(a.start, min(a.stop, n), a.step) for a, n in zip(axes, shape, strict=True)]
            if all(within):
                target = tuple(slice(len(axis)) for axis in within)
                # Without the Ellipsis, a record without axes would be a scalar.
                out[at, ...][target] = self._region(number, within)
        return out.reshape(selection.shape)

    def _region(self, number: int, axes: Sequence[range]) -> NDArray[np.generic]:
        parts = [slice(axis.start, axis.stop, axis.step) for axis in axes]
        if not self._is_packed:
            found = self._records.read(number, tuple(parts))
            return found if self._as_bits else to_values(found, self._name)
        last = axes[-1]
        # Whole bytes are read, and the wanted halves are picked afterwards.
        first, end = last.start // 2, -(-last.stop // 2)
        stored = self._records.shape(number)
        region = (*parts[:-1], slice(first, end)) if stored else ...
        return to_values(self._records.read(number, region), self._name)[
            ..., last.start - 2 * first : last.stop - 2 * first : last.step
        ]
