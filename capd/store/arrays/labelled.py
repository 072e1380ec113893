"""The labelled array of a series: its axes have names, its records have moments, and nothing is read before it is used.

Needs xarray, so `Series.xarray` imports this module when it is called.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from capd.store.arrays.lazy import LazyArray
from capd_client.protocol.key import Key, Moment

__all__ = ["dimension_names", "labelled"]

_AXES = {"b": "batch", "s": "sequence", "h": "head", "d": "size", "t": "token"}
_OUTPUTS = ("output", "grad_output")


class _Backend(BackendArray):
    """The adapter with which xarray indexes a lazy array."""

    def __init__(self, array: LazyArray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, self._array.__getitem__
        )


def labelled(
    array: LazyArray,
    key: Key,
    attributes: Mapping[str, Any],
    numbers: Sequence[int],
    moments: Sequence[Moment],
) -> Any:
    """Return a lazy xarray.DataArray. It keeps in memory what was read once.

    Args:
        array: The elements.
        key: The key of the series.
        attributes: Further attributes. With the key, they become the attrs.
        numbers: The numbers of the records, the coordinate `record`.
        moments: The moments of the records. Each field becomes a coordinate, `time_ns` as datetime64 `time`.
    """
    names = ("record", *dimension_names(key, attributes, array.ndim - 1))
    # xarray has no types for these.
    wrappers: Any = indexing
    lazy = wrappers.LazilyIndexedArray(_Backend(array))
    cached = wrappers.MemoryCachedArray(wrappers.CopyOnWriteArray(lazy))
    attrs = {name: _plain(value) for name, value in {**attributes, **msgspec.to_builtins(key)}.items()}
    variable = xr.Variable(names, cached, {name: value for name, value in attrs.items() if value is not None})
    coordinates = {"record": np.asarray(numbers, dtype=np.int64), **_coordinates(moments)}
    named = {name: ("record", values) for name, values in coordinates.items()}
    return xr.DataArray(variable, coords=named, name=key.tensor_name or None)


def dimension_names(key: Key, attributes: Mapping[str, Any], ndim: int) -> tuple[str, ...]:
    """Return the names of a record's axes; `dim_0`, `dim_1`, … for those whose meaning is unknown."""
    unknown = tuple(f"dim_{axis}" for axis in range(ndim))
    names = _known_names(key, attributes, unknown)
    # With equal names, most operations of xarray fail.
    return names if len({*names}) == len(names) == ndim else unknown


def _known_names(key: Key, attributes: Mapping[str, Any], unknown: tuple[str, ...]) -> tuple[str, ...]:
    # tensor_saver recorded dY as the input of a backward.
    is_dy = key.operation == "backward" and key.tensor_name == "input"
    name = "grad_output" if is_dy else key.tensor_name
    layout = attributes.get("layout")
    if name in _OUTPUTS:
        layout = attributes.get("output_layout", layout)
    if isinstance(layout, str):
        known = set(layout) <= _AXES.keys()
        return tuple(_AXES[letter] for letter in layout) if known else unknown
    if key.component != "linear" or not unknown:
        return unknown
    if name in ("weight", "grad_weight"):
        axes = str(attributes.get("weight_layout", "out_in")).replace(",", "_").split("_")
        return tuple(axis if axis == "expert" else f"{axis}_feature" for axis in axes)
    if name in _OUTPUTS:
        return (*unknown[:-1], "out_feature")
    return (*unknown[:-1], "in_feature") if name in ("input", "grad_input") else unknown


def _coordinates(moments: Sequence[Moment]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in Moment.__struct_fields__:
        values = [getattr(moment, name) for moment in moments]
        if name == "time_ns":
            found["time"] = np.array(values, dtype="datetime64[ns]")
        elif None not in values:
            found[name] = np.asarray(values)
        elif any(value is not None for value in values):
            found[name] = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return found


def _plain(value: Any) -> Any:
    """Return an attribute as netCDF and Zarr take it: containers as JSON text."""
    return json.dumps(value) if isinstance(value, (dict, list, tuple)) else value
