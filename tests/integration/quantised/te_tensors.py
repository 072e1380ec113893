"""Quantised tensors as TransformerEngine lays them out and takes them apart, built from descriptions of its layouts.

Nothing here is TransformerEngine's code: classes of its names tell their inner tensors and their context as its
`QuantizedTensorStorage.__tensor_flatten__` does, and every scale is put where a formula says, one by one.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor


class DType(enum.IntEnum):
    """The numbers are TransformerEngine's."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class Quantizer:
    def __init__(self, **options: bool) -> None:
        self.__dict__.update(options)


class _Storage(torch.Tensor):
    """A wrapper with inner tensors in attributes, None where there is none, and options for its constructor."""

    def __new__(cls, shape: Any, dtype: torch.dtype, inner: Any, options: Any, **state: Any) -> _Storage:
        made: _Storage = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.__dict__.update({**inner, **state, "_inner": tuple(inner), "_options": options})
        return made

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        held: Any = self
        context = {
            "cls": type(self),
            "is_tensor": True,
            "requires_grad": False,
            "nontensor_kwargs": {**held._options, "quantizer": None, "fake_dtype": self.dtype},
        }
        return [name for name in held._inner if getattr(self, name) is not None], context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(size, torch.float32, inner, context["nontensor_kwargs"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def _class(name: str, module: str) -> type[_Storage]:
    return type(name, (_Storage,), {"__module__": f"transformer_engine.pytorch.tensor.{module}"})


Float8Tensor = _class("Float8Tensor", "float8_tensor")
MXFP8Tensor = _class("MXFP8Tensor", "mxfp8_tensor")
NVFP4Tensor = _class("NVFP4Tensor", "nvfp4_tensor")
Float8BlockwiseQTensor = _class("Float8BlockwiseQTensor", "float8_blockwise_tensor")


class OldFloat8Tensor(torch.Tensor):
    """As before version 2.20: `get_metadata` instead of `__tensor_flatten__`, other names."""

    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype, transpose: Tensor) -> OldFloat8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype)

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype, transpose: Tensor) -> None:
        self._data, self._scale_inv, self._transpose = data, scale, transpose
        self._transpose_invalid = False

    def get_metadata(self) -> dict[str, Any]:
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": DType.kFloat8E4M3,
            "data_transpose": self._transpose,
            "quantizer": None,
        }

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


OldFloat8Tensor.__module__ = "transformer_engine.pytorch.tensor.float8_tensor"
OldFloat8Tensor.__qualname__ = "Float8Tensor"


def rounded_up(size: int, to: int) -> int:
    return -(-size // to) * to


def padded(scales: Tensor, rows: int, columns: int, rubbish: bool = True) -> Tensor:
    """Scales in the corner of [rows, columns]; what pads them is no zero, so that nobody may read it unseen."""
    kept = torch.full(
        (rounded_up(scales.shape[0], rows), rounded_up(scales.shape[1], columns)), 77.0 * rubbish
    )
    kept = kept.to(scales.dtype)
    for i in range(scales.shape[0]):
        kept[i, : scales.shape[1]] = scales[i]
    return kept


def swizzled(scales: Tensor) -> Tensor:
    """Each scale (i, j) of tiles of 128x4 at 16 (i mod 32) + 4 (i div 32) + j, in the padded shape."""
    rows, columns = rounded_up(scales.shape[0], 128), rounded_up(scales.shape[1], 4)
    kept = torch.zeros(rows * columns, dtype=scales.dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = (i // 128) * (columns // 4) + j // 4
            within = i % 128
            kept[512 * tile + 16 * (within % 32) + 4 * (within // 32) + j % 4] = scales[i, j]
    return kept.view(rows, columns)


def packed(codes: Tensor) -> Tensor:
    """fp4 codes, two a byte, the even one in the low half."""
    return codes[..., 0::2] + 16 * codes[..., 1::2]


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of fp4 codes."""


def fp4_values(codes: Tensor) -> Tensor:
    return torch.tensor(FP4)[codes.long()]


def fp8_codes(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Any codes of finite values, uint8."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return torch.where(codes.view(dtype).float().isfinite(), codes, 0x35)


def powers(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """E8M0 bytes around 1, and what they stand for."""
    found = torch.randint(110, 140, shape, dtype=torch.uint8, generator=generator)
    return found, torch.ldexp(torch.ones(shape), found.int() - 127)
