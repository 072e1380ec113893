"""The quantiser that emulation calls: `capd::quantise`, a torch operator around `capd_client.formats`.

An operator is one node of a compiled graph. Fake tensors and meta devices never reach the tables that the formats
keep per device. The operator that rounds at random has another name, which marks it as random, so graphs do not
recompute it. A format is passed as text, so that it is a constant for a tracer.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any, Optional

import torch
from torch import Tensor

from capd_client.config.recipe import QuantSpec
from capd_client.formats.encoding import layout_of, quantised
from capd_client.formats.spec import FORMATS, OPTIONS, FormatError, Spec, spec_of
from capd_client.formats.special.deviation import clip_mask as clip_mask_of_rows
from capd_client.formats.transforms.hadamard import hadamard, inverse_hadamard
from capd_client.recipes.linear_recipe import Operand, Transform
from capd_client.tensors.autograd import autocast_dtype, product_dtype

__all__ = [
    "DTYPES", "cast", "clip_mask", "has_no_axis", "is_random", "quantise", "spec_of_word", "straight_through",
    "transform", "transform_of_word", "transform_pair", "transform_word", "untransform", "word_of", "word_of_operand",
]  # fmt: skip

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
"""The dtypes that are quantised. Other tensors are used unchanged."""

_STOCHASTIC = "random "
_NO_AXIS = "whole "

# torch's class is untyped.
_Library: Any = torch.library.Library
_library = _Library("capd", "FRAGMENT")
_library.define("quantise(Tensor x, str word, int axis) -> Tensor")
_library.define(
    "quantise_at_random(Tensor x, str word, int axis) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
_library.define("transform(Tensor x, str word, int axis, bool inverse) -> Tensor")
_library.define(
    "transform_pair(Tensor a, Tensor b, str word, int axis_a, int axis_b) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define("clip_mask(Tensor x, str word, int axis) -> Tensor")


def _quantise(x: Tensor, word: str, axis: int) -> Tensor:
    return quantised(x, spec_of_word(word, axis), None)


def _fake(x: Tensor, word: str, axis: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _transform(x: Tensor, word: str, axis: int, inverse: bool) -> Tensor:
    size, signs, rounded = transform_of_word(word)
    own = inverse_hadamard if inverse else hadamard
    return _rounded(own(x, size, axis=axis, signs=signs, round_to=rounded), x)


def _transform_pair(a: Tensor, b: Tensor, word: str, axis_a: int, axis_b: int) -> tuple[Tensor, Tensor]:
    size, _, rounded = transform_of_word(word)
    # Both operands have the same signs, so that the transforms cancel in the product.
    signs = torch.randint(2, (size,), device=a.device).mul_(2).sub_(1).to(torch.float32)
    one = _rounded(hadamard(a, size, axis=axis_a, signs=signs, round_to=rounded), a)
    return one, _rounded(hadamard(b, size, axis=axis_b, signs=signs, round_to=rounded), b)


def _rounded(found: Tensor, x: Tensor) -> Tensor:
    """Return a transformed tensor in the dtype of the operand."""
    return found if found.dtype == x.dtype else found.to(x.dtype)


def _clip_mask(x: Tensor, word: str, axis: int) -> Tensor:
    spec = spec_of_word(word, axis)
    layout = layout_of(x, spec)
    return layout.join(clip_mask_of_rows(layout.rows(x.detach()).to(torch.float32)))


def _fake_pair(a: Tensor, b: Tensor, word: str, axis_a: int, axis_b: int) -> tuple[Tensor, Tensor]:
    return _fake(a, word, axis_a), _fake(b, word, axis_b)


def _fake_transform(x: Tensor, word: str, axis: int, inverse: bool) -> Tensor:
    return _fake(x, word, axis)


def _fake_mask(x: Tensor, word: str, axis: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


for _own, _real, _traced in (
    ("transform", _transform, _fake_transform),
    ("transform_pair", _transform_pair, _fake_pair),
    ("clip_mask", _clip_mask, _fake_mask),
):
    _library.impl(_own, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"capd::{_own}", _traced, lib=_library)

for _name in ("quantise", "quantise_at_random"):
    _library.impl(_name, _quantise, "CompositeExplicitAutograd")
    torch.library.register_fake(f"capd::{_name}", _fake, lib=_library)


def word_of(spec: Optional[QuantSpec]) -> str:
    """Return the text by which the operator knows a format. "" for None."""
    if spec is None:
        return ""
    options = spec.options()
    return _word(spec.format, options)


def word_of_operand(operand: Optional[Operand]) -> str:
    """Return the text of an operand of a recipe. "" for None."""
    return "" if operand is None else _word(operand.format, _settled_options(operand))


def _settled_options(operand: Operand) -> dict[str, Any]:
    spec = operand.spec
    found = {name: getattr(spec, name, None) for name in OPTIONS if name not in ("axis", "preset")}
    if not FORMATS[spec.fmt].has_tensor_scale:
        del found["tensor_scale"]
    return {name: value for name, value in found.items() if value is not None}


def transform_word(transform: Optional[Transform]) -> str:
    """Return the text by which the operators know a transform. "" for None."""
    if transform is None:
        return ""
    random = _STOCHASTIC if transform.signs == "seeded" else ""
    return random + json.dumps([transform.size, transform.signs, transform.round_to])


def is_random(word: str) -> bool:
    """Whether results depend on random bits, of a format or of a transform."""
    return word.startswith(_STOCHASTIC)


def _word(fmt: str, options: dict[str, Any]) -> str:
    random = _STOCHASTIC if options.get("rounding") in ("stochastic", "eden") else ""
    # With one scale for the tensor, or none, every axis has the same result.
    whole = _NO_AXIS if options.get("block") is None else ""
    return random + whole + json.dumps({"fmt": fmt, **options})


@lru_cache(maxsize=256)
def spec_of_word(word: str, axis: int) -> Spec:
    """Return the format of a word, with its blocks along an axis."""
    options = json.loads(word[word.index("{") :])
    fmt = options.pop("fmt")
    if options.get("block") is not None:
        options["axis"] = axis
    return spec_of(fmt, options)


@lru_cache(maxsize=64)
def transform_of_word(word: str) -> tuple[int, Optional[str], Optional[torch.dtype]]:
    """Return the size of a transform's word, its fixed signs, and the dtype to which results are rounded."""
    size, signs, rounded = json.loads(word[word.index("[") :])
    return size, "te" if signs == "te" else None, torch.bfloat16 if rounded == "bf16" else None


def has_no_axis(word: str) -> bool:
    """Whether the result is the same along every axis, so that one result is enough."""
    return _NO_AXIS in word


def quantise(x: Tensor, word: str, axis: int) -> Tensor:
    """Return `x` in the format, in its own dtype and shape, outside of autograd. For "" return `x` itself.

    For a DTensor each rank's part is quantised. Blocks and the scale of a tensor do not extend beyond the part.
    """
    if not word:
        return x
    if _is_distributed(x):
        return _of_parts(x, word, axis, sys.modules["torch.distributed.tensor"])
    if word.startswith(_STOCHASTIC):
        return torch.ops.capd.quantise_at_random(x, word, axis)  # type: ignore[no-any-return]
    return torch.ops.capd.quantise(x, word, axis)  # type: ignore[no-any-return]


def _of_parts(x: Any, word: str, axis: int, tensor: Any) -> Tensor:
    """Quantise each rank's part. Partial sums are added up first, because rounding is not linear."""
    if any(place.is_partial() for place in x.placements):
        whole = [tensor.Replicate() if place.is_partial() else place for place in x.placements]
        x = x.redistribute(placements=whole)
    part = quantise(x.to_local(), word, axis)
    return tensor.DTensor.from_local(  # type: ignore[no-any-return]
        part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.contiguous().stride()
    )


def transform(x: Tensor, word: str, axis: int) -> Tensor:
    """Return `x` transformed along an axis by a word whose signs are fixed, in x's dtype. For "" return `x` itself."""
    return _turned(x, word, axis, inverse=False) if word else x


def untransform(x: Tensor, word: str, axis: int) -> Tensor:
    """Undo `transform`. For "" return `x` itself."""
    return _turned(x, word, axis, inverse=True) if word else x


def transform_pair(a: Tensor, b: Tensor, word: str, axis_a: int, axis_b: int) -> tuple[Tensor, Tensor]:
    """Return both operands of a product transformed along the contraction, with the same signs, in their dtypes."""
    if word.startswith(_STOCHASTIC):
        if _is_distributed(a) or _is_distributed(b):
            raise FormatError(
                "a transform with seeded signs takes no DTensor, because its ranks would draw different signs; give "
                'the transform signs = "none"'
            )
        one, other = torch.ops.capd.transform_pair(a, b, word, axis_a, axis_b)
        return one, other
    return transform(a, word, axis_a), transform(b, word, axis_b)


def _turned(x: Any, word: str, axis: int, *, inverse: bool) -> Tensor:
    if not _is_distributed(x):
        return torch.ops.capd.transform(x, word, axis, inverse)  # type: ignore[no-any-return]
    # The transform is linear, so it takes partial sums as they are.
    part = torch.ops.capd.transform(x.to_local(), word, axis, inverse)
    tensor = sys.modules["torch.distributed.tensor"]
    return tensor.DTensor.from_local(  # type: ignore[no-any-return]
        part, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.contiguous().stride()
    )


def _is_distributed(x: Any) -> bool:
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(x, tensor.DTensor)


def clip_mask(x: Tensor, word: str, axis: int) -> Tensor:
    """Return which values a format with `scale_mode="std"` does not clip, bool."""
    return torch.ops.capd.clip_mask(x, word, axis)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    """The quantiser in the forward, with a gradient that passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, word: str, axis: int) -> Tensor:
        return quantise(x, word, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def straight_through(x: Tensor, word: str, axis: int) -> Tensor:
    """Return `quantise` of x, with the gradient of x itself."""
    if word and x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, word, axis)  # type: ignore[no-any-return, no-untyped-call]
    return quantise(x, word, axis)


def cast(x: Any) -> Any:
    """Return `x` in the dtype in which a matrix product computes: autocast's, or its own."""
    if not isinstance(x, Tensor):
        return x
    dtype = product_dtype(x, autocast_dtype(x.device.type))
    return x if dtype is None else x.to(dtype)
