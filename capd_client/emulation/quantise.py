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
from capd_client.formats.encoding import quantised
from capd_client.formats.spec import Spec, spec_of
from capd_client.tensors.autograd import autocast_dtype, product_dtype

__all__ = ["DTYPES", "cast", "has_no_axis", "quantise", "straight_through", "word_of"]

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


def _quantise(x: Tensor, word: str, axis: int) -> Tensor:
    return quantised(x, _spec(word, axis), None)


def _fake(x: Tensor, word: str, axis: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _name in ("quantise", "quantise_at_random"):
    _library.impl(_name, _quantise, "CompositeExplicitAutograd")
    torch.library.register_fake(f"capd::{_name}", _fake, lib=_library)


def word_of(spec: Optional[QuantSpec]) -> str:
    """Return the text by which the operator knows a format. "" for None."""
    if spec is None:
        return ""
    options = spec.options()
    random = _STOCHASTIC if options.get("rounding") == "stochastic" else ""
    # With one scale for the tensor, or none, every axis has the same result.
    whole = _NO_AXIS if options.get("block") is None else ""
    return random + whole + json.dumps({"fmt": spec.format, **options})


@lru_cache(maxsize=256)
def _spec(word: str, axis: int) -> Spec:
    options = json.loads(word[word.index("{") :])
    fmt = options.pop("fmt")
    if options.get("block") is not None:
        options["axis"] = axis
    return spec_of(fmt, options)


def has_no_axis(word: str) -> bool:
    """Whether the result is the same along every axis, so that one result is enough."""
    return _NO_AXIS in word


def quantise(x: Tensor, word: str, axis: int) -> Tensor:
    """Return `x` in the format, in its own dtype and shape, outside of autograd. For "" return `x` itself.

    For a DTensor each rank's part is quantised. Blocks and the scale of a tensor do not extend beyond the part.
    """
    if not word:
        return x
    tensor: Any = sys.modules.get("torch.distributed.tensor")
    if tensor is not None and isinstance(x, tensor.DTensor):
        return _of_parts(x, word, axis, tensor)
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
