"""Quantised tensors of torchao, made by itself on the CPU, each with what its own `dequantize` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.quantization import PerBlock, PerRow, PerTensor
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

CASES: dict[str, Callable[[], tuple[Any, Tensor]]] = {}
FP4 = torch.float4_e2m1fn_x2


def _spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers of many magnitudes, with zeros."""
    generator = torch.Generator().manual_seed(5)
    found = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-9, 9, shape, generator=generator)
    )
    return torch.where(found.abs() < 1e-3, 0.0, found).to(dtype)


def _own(tensor: Any) -> tuple[Any, Tensor]:
    return tensor, tensor.dequantize()


def _mx(shape: tuple[int, ...], element: Any, dtype: torch.dtype, turn: bool = False, **options: Any) -> Any:
    found = MXTensor.to_mx(_spread(*shape, dtype=dtype), element, **options)
    return _own(found.t() if turn else found)


for _name, _element in {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m3": DTYPE_FP6_E2M3, "e3m2": DTYPE_FP6_E3M2, "e2m1": FP4,
}.items():  # fmt: skip
    for _dtype in (torch.bfloat16, torch.float32):
        CASES[f"mx_{_name}_{str(_dtype)[6:]}"] = lambda e=_element, d=_dtype: _mx((6, 96), e, d)
    CASES[f"mx_{_name}_stack"] = lambda e=_element: _mx((2, 3, 5, 64), e, torch.bfloat16)
for _name, _element in {"e4m3": torch.float8_e4m3fn, "e2m1": FP4}.items():
    CASES[f"mx_{_name}_turned"] = lambda e=_element: _mx((6, 96), e, torch.bfloat16, turn=True)
    CASES[f"mx_{_name}_square_turned"] = lambda e=_element: _mx((64, 64), e, torch.bfloat16, turn=True)
    for _shape in ((256, 128), (130, 96)):
        for _turn in (False, True):
            CASES[f"mx_{_name}_swizzled_{_shape[0]}_{_turn}"] = lambda e=_element, s=_shape, t=_turn: _mx(
                s, e, torch.bfloat16, turn=t, is_swizzled_scales=True
            )
CASES["mx_swizzled_stack"] = lambda: _mx(
    (2, 128, 64), torch.float8_e4m3fn, torch.bfloat16, is_swizzled_scales=True
)
CASES["mx_one_row_turned"] = lambda: one_row_turned(torch.float8_e4m3fn)
CASES["mx_small_blocks"] = lambda: _mx((4, 32), torch.float8_e4m3fn, torch.float32, block_size=16)


def one_row_turned(element: torch.dtype) -> Any:
    """Of packed fp4, torchao 0.18.0 itself takes the wrong axis for the packed one: its shape is [48, 2]."""
    return _mx((1, 96), element, torch.bfloat16, turn=True)


def _all_scales(element: torch.dtype, dtype: torch.dtype) -> Any:
    """Every scale byte over every code."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(element)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 8).view(torch.float8_e8m0fnu)
    return _own(MXTensor(codes, scales, element, 32, dtype, KernelPreference.EMULATED, None, False))


for _dtype in (torch.bfloat16, torch.float32, torch.float16):
    CASES[f"mx_all_{str(_dtype)[6:]}"] = lambda d=_dtype: _all_scales(torch.float8_e4m3fn, d)
    CASES[f"mx_all_e5m2_{str(_dtype)[6:]}"] = lambda d=_dtype: _all_scales(torch.float8_e5m2, d)


def _turned(tensor: Any) -> Any:
    return tensor.t() if tensor.ndim == 2 else tensor.transpose(-2, -1)


def _nvfp4(shape: tuple[int, ...], scale: Tensor | None, turn: bool = False, **options: Any) -> Any:
    dtype = options.pop("dtype", torch.bfloat16)
    found = NVFP4Tensor.to_nvfp4(_spread(*shape, dtype=dtype), per_tensor_scale=scale, **options)
    return _own(_turned(found) if turn else found)


_SCALE = torch.tensor(0.0371)
_EACH = torch.tensor([0.11, 0.37, 1.7]).view(3, 1, 1)
for _turn in (False, True):
    CASES[f"nvfp4_plain_{_turn}"] = lambda t=_turn: _nvfp4((10, 48), None, turn=t)
    CASES[f"nvfp4_scaled_{_turn}"] = lambda t=_turn: _nvfp4((64, 64), _SCALE, turn=t, dtype=torch.float32)
    CASES[f"nvfp4_swizzled_{_turn}"] = lambda t=_turn: _nvfp4(
        (200, 80), _SCALE, turn=t, is_swizzled_scales=True
    )
    CASES[f"nvfp4_experts_{_turn}"] = lambda t=_turn: _nvfp4((3, 20, 32), _EACH, turn=t)
CASES["nvfp4_experts_swizzled"] = lambda: _nvfp4((3, 128, 64), _EACH, is_swizzled_scales=True)
CASES["nvfp4_activation_scale"] = lambda: _nvfp4((8, 32), _SCALE, act_per_tensor_scale=torch.tensor(7.0))


def _float8(shape: tuple[int, ...], granularity: Any, dtype: torch.dtype, turn: bool = False) -> Any:
    found: Any = Float8Tensor.from_hp(
        _spread(*shape, dtype=dtype), granularity=granularity, kernel_preference=KernelPreference.TORCH
    )
    return _own(found.t() if turn else found)


for _dtype in (torch.bfloat16, torch.float32):
    CASES[f"float8_tensor_{str(_dtype)[6:]}"] = lambda d=_dtype: _float8((6, 40), PerTensor(), d)
    CASES[f"float8_row_{str(_dtype)[6:]}"] = lambda d=_dtype: _float8((6, 40), PerRow(), d)
CASES["float8_row_turned"] = lambda: _float8((6, 40), PerRow(), torch.bfloat16, turn=True)
CASES["float8_block"] = lambda: _float8((256, 384), PerBlock([128, 128]), torch.bfloat16)
CASES["float8_row_block"] = lambda: _float8((6, 256), PerBlock([1, 128]), torch.float16)


def _training(shape: tuple[int, ...], scale: Tensor, axis: int | None, dtype: torch.dtype) -> Any:
    found: Any = hp_tensor_and_scale_to_float8(
        _spread(*shape, dtype=dtype), scale, torch.float8_e4m3fn, axiswise_dim=axis
    )
    return found, found.to_original_precision().to(dtype)  # with scales along an axis it gives float32


for _dtype in (torch.bfloat16, torch.float32):
    CASES[f"training_{str(_dtype)[6:]}"] = lambda d=_dtype: _training((6, 40), torch.tensor(0.77), None, d)
    CASES[f"training_axis_{str(_dtype)[6:]}"] = lambda d=_dtype: _training(
        (6, 40), torch.rand(6, 1, generator=torch.Generator().manual_seed(1)) + 0.5, -1, d
    )
