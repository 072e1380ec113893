"""TransformerEngine's layouts as tensors to capture, each with the values that its definition gives them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from tests.integration.quantised import te_tensors as te
from tests.integration.quantised.te_tensors import DType, padded, swizzled

Case = tuple[Tensor, Tensor]
CASES: dict[str, Callable[[], Case]] = {}
REFUSED: dict[str, tuple[Any, str]] = {}
"""Tensors whose values their layout does not settle, with what is said about them."""


def _random(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _case(name: str, build: Callable[..., Case], *arguments: Any, **options: Any) -> None:
    CASES[f"te_{name}"] = lambda: build(*arguments, **options)


def _float8(shape: tuple[int, ...], keep: str, dtype: torch.dtype, fp8: DType) -> Case:
    kind = torch.float8_e4m3fn if fp8 is DType.kFloat8E4M3 else torch.float8_e5m2
    codes = te.fp8_codes(_random(), *shape, dtype=kind)
    scale = torch.tensor([0.37])
    values = (codes.view(kind).float() * scale).to(dtype)
    transpose = codes.movedim(-1, 0).contiguous() if keep != "data" else None
    inner = {"_data": codes if keep != "transpose" else None, "_transpose": transpose, "_scale_inv": scale}
    if keep == "outdated":
        inner["_transpose"] = torch.zeros_like(codes.movedim(-1, 0)).contiguous()
    invalid = transpose is None or keep == "outdated"
    made = te.Float8Tensor(shape, dtype, inner, {"fp8_dtype": fp8}, _transpose_invalid=invalid)
    return made, values


for kept in ("data", "transpose", "both", "outdated"):
    for fp8 in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        _case(f"float8_{kept}_{fp8.name}", _float8, (3, 5, 8), kept, torch.bfloat16, fp8)
_case("float8_float32", _float8, (16,), "data", torch.float32, DType.kFloat8E4M3)


def _old_float8(*, only_transpose: bool = False) -> Case:
    codes, scale = te.fp8_codes(_random(), 6, 4), torch.tensor([3.3])
    made: Any = te.OldFloat8Tensor(codes, scale, torch.float16, codes.t().contiguous())
    made._data = None if only_transpose else codes
    return made, (codes.view(torch.float8_e4m3fn).float() * scale).half()


_case("float8_old", _old_float8)
_case("float8_old_transpose", _old_float8, only_transpose=True)


def _mxfp8(shape: tuple[int, ...], keep: str, swizzle: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    """By rows and by columns are two quantisations: their values differ, so that one cannot pass for the other."""
    generator, rows, columns = _random(), prod(shape[:-1]), shape[-1]
    inner: dict[str, Tensor | None] = dict.fromkeys(
        ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    )
    values = torch.empty(0)
    for side in ("columnwise", "rowwise"):
        if keep not in (side, "both"):
            continue
        codes = te.fp8_codes(generator, *shape)
        along = codes.view(torch.float8_e4m3fn).float().reshape(rows, columns)
        along = along if side == "rowwise" else along.t()
        found, scales = te.powers(generator, along.shape[0], along.shape[1] // 32)
        product = along * scales.repeat_interleave(32, 1)
        values = (product if side == "rowwise" else product.t()).to(dtype).reshape(shape)
        plain = padded(found, 128, 4) if side == "rowwise" else padded(found.t(), 4, 128)
        inner[f"_{side}_data"] = codes
        inner[f"_{side}_scale_inv"] = swizzled(found) if swizzle else plain
    options = {"fp8_dtype": DType.kFloat8E4M3, "with_gemm_swizzled_scales": swizzle}
    return te.MXFP8Tensor(shape, dtype, inner, options), values


for kept in ("rowwise", "columnwise", "both"):
    for swizzle in (False, True):
        _case(f"mxfp8_{kept}_{swizzle}", _mxfp8, (2, 80, 160), kept, swizzle)
_case("mxfp8_whole_tiles", _mxfp8, (256, 128), "columnwise", True, torch.float32)


def _nvfp4(
    shape: tuple[int, ...], keep: str, swizzle: bool, largest: int = 448, row_scaled: bool = False
) -> Case:
    generator, rows, columns = _random(), prod(shape[:-1]), shape[-1]
    names = [f"_{side}_{what}" for side in ("rowwise", "columnwise") for what in ("data", "scale_inv")]
    inner: dict[str, Tensor | None] = dict.fromkeys((*names, "_amax_rowwise", "_amax_columnwise"))
    values = torch.empty(0)
    for side in ("columnwise", "rowwise"):
        if keep not in (side, "both"):
            continue
        height, width = (rows, columns) if side == "rowwise" else (columns, rows)
        codes = torch.randint(0, 16, (height, width), dtype=torch.uint8, generator=generator)
        found = te.fp8_codes(generator, height, width // 16) & 0x7F
        amax = torch.rand(rows if row_scaled else 1, generator=generator) * 9
        inverse = torch.tensor(1.0 / (6 * largest), dtype=torch.float64).float()
        scales = found.view(torch.float8_e4m3fn).float() * amax.reshape(-1, 1) * inverse
        product = (te.fp4_values(codes) * scales.repeat_interleave(16, 1)).bfloat16()
        values = (product if side == "rowwise" else product.t()).reshape(shape)
        lead = shape[:-1] if side == "rowwise" else (columns, *shape[:-2])
        inner[f"_{side}_data"] = te.packed(codes).reshape(*lead, -1)
        inner[f"_{side}_scale_inv"] = swizzled(found) if swizzle else padded(found, 128, 4)
        inner[f"_amax_{side}"] = amax
    options = {
        "fp4_dtype": DType.kFloat4E2M1, "with_gemm_swizzled_scales": swizzle, "row_scaled_nvfp4": row_scaled,
        "nvfp4_use_4over6": largest == 256, "nvfp4_e4m3_max": largest,
    }  # fmt: skip
    made = te.NVFP4Tensor(shape, torch.bfloat16, inner, options, _quantizer=te.Quantizer(with_rht=False))
    return made, values


for kept in ("rowwise", "columnwise", "both"):
    for swizzle in (False, True):
        _case(f"nvfp4_{kept}_{swizzle}", _nvfp4, (3, 48, 144), kept, swizzle)
_case("nvfp4_256", _nvfp4, (32, 64), "rowwise", False, 256)
_case("nvfp4_row_scaled", _nvfp4, (5, 32), "rowwise", True, 448, True)
_case("nvfp4_row_scaled_256", _nvfp4, (5, 32), "rowwise", False, 256, True)


def _blockwise(shape: tuple[int, ...], keep: str, tiles: bool, dtype: torch.dtype = torch.bfloat16) -> Case:
    generator, rows, columns = _random(), prod(shape[:-1]), shape[-1]
    inner: dict[str, Tensor | None] = dict.fromkeys(
        ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    )
    values = torch.empty(0)
    for side in ("columnwise", "rowwise"):
        if keep not in (side, "both"):
            continue
        height, width = (rows, columns) if side == "rowwise" else (columns, rows)
        codes = te.fp8_codes(generator, height, width)
        scales = torch.rand(-(-height // 128) if tiles else height, -(-width // 128), generator=generator)
        down = torch.arange(height) // (128 if tiles else 1)
        each = scales[down[:, None], torch.arange(width) // 128]
        product = (codes.view(torch.float8_e4m3fn).float() * each).to(dtype)
        values = (product if side == "rowwise" else product.t()).reshape(shape)
        inner[f"_{side}_data"] = codes.reshape(*(shape if side == "rowwise" else (columns, *shape[:-1])))
        inner[f"_{side}_scale_inv"] = padded(scales, 1, 4) if tiles else padded(scales.t(), 1, 4)
    options = {"fp8_dtype": DType.kFloat8E4M3, "is_2D_scaled": tiles}
    return te.Float8BlockwiseQTensor(shape, dtype, inner, options), values


for kept in ("rowwise", "columnwise", "both"):
    for tiles in (False, True):
        _case(f"blockwise_{kept}_{tiles}", _blockwise, (2, 35, 150), kept, tiles)
_case("blockwise_square", _blockwise, (130, 130), "rowwise", False, torch.float32)


def _refused(name: str, says: str, case: Case, **changes: Any) -> None:
    """A case with options, or attributes, put differently."""
    made: Any = case[0]
    for option, value in changes.items():
        if option.startswith("_"):
            setattr(made, option, value)
        else:
            made._options = {**made._options, option: value}
    REFUSED[f"no_{name}"] = (made, says)


_refused(
    "stale_transpose", "'transpose' was not captured",
    _float8((4, 8), "transpose", torch.float32, DType.kFloat8E4M3), _transpose_invalid=True,
)  # fmt: skip
_refused(
    "old_stale_transpose", "'transpose' was not captured", _old_float8(only_transpose=True),
    _transpose_invalid=True,
)  # fmt: skip
_refused("fp8_dtype", "its elements are 10", _mxfp8((4, 32), "rowwise", False), fp8_dtype=DType.kFloat4E2M1)
_refused(
    "no_data", "'columnwise_data' was not captured", _mxfp8((4, 32), "rowwise", False), _rowwise_data=None
)
_refused(
    "no_scale", "'rowwise_scale_inv' was not", _mxfp8((4, 32), "rowwise", False), _rowwise_scale_inv=None
)
_refused(
    "hadamard", "random Hadamard transform", _nvfp4((32, 32), "columnwise", False),
    _quantizer=te.Quantizer(with_rht=True),
)  # fmt: skip
_refused(
    "hadamard_unknown", "random Hadamard transform", _nvfp4((32, 32), "columnwise", False), _quantizer=None
)
_refused("e4m3_max", "largest scale is 240", _nvfp4((4, 32), "rowwise", False), nvfp4_e4m3_max=240)
_refused("row_amax", "1 amax for 4 rows", _nvfp4((4, 32), "rowwise", False), row_scaled_nvfp4=True)
_refused("compact", "data_format", _blockwise((4, 128), "rowwise", False), data_format="COMPACT")
_refused("is_2d", "is_2D_scaled", _blockwise((4, 128), "rowwise", False), is_2D_scaled=None)
_refused(
    "few_scales",
    "do not fit together",
    _blockwise((4, 256), "rowwise", True),
    _rowwise_scale_inv=torch.ones(1, 1),
)
