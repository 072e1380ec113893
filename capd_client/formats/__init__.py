"""Number formats, exact to the bit: bf16, fp16, fp8, mxfp8, mxfp6, mxfp4, nvfp4 and hifp8.

    y = qdq(x, "mxfp8", elem="e4m3", axis=-1, scale_mode="rceil")
    encoded = encode(x, "nvfp4")            # encoded.payload, encoded.scale, encoded.global_scale
    y = decode(encoded)

Pure torch on the tensor's own device, outside of autograd; x is never changed. Each format's definition, with its
source, stands in the module that computes it: `unscaled` (bf16, fp16), `fp8`, `mx`, `nvfp4`, `hif8`, and `legacy` for
the preset of that name. docs/formats.md has all in one table. Importing this package loads no torch; its functions do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from capd_client.formats.encoded import Encoded
from capd_client.formats.spec import FORMATS as _FAMILIES
from capd_client.formats.spec import OPTIONS, Block, FormatError, spec_of

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "Encoded", "FormatError", "decode", "encode", "qdq"]

FORMATS = tuple(_FAMILIES)
"""The names of the formats."""


def encode(
    x: torch.Tensor,
    fmt: str,
    *,
    elem: Optional[str] = None,
    block: Block = None,
    axis: Optional[int] = None,
    scale_mode: Optional[str] = None,
    rounding: Optional[str] = None,
    overflow: Optional[str] = None,
    tensor_scale: Optional[bool] = None,
    preset: Optional[str] = None,
    generator: Optional[torch.Generator] = None,
) -> Encoded:
    """Quantise `x` into codes and scales.

    x: bfloat16, float16, float32, or float64, which is rounded to float32 first; any shape, any strides.
    fmt: one of FORMATS. An option that is None is the format's default, the first in each list:

    - elem: fp8, mxfp8 "e4m3", "e5m2"; mxfp6 "e2m3", "e3m2"; mxfp4 and nvfp4 "e2m1".
    - block: how many values along `axis` share a scale (mx 32, nvfp4 16), or a tile (rows, columns) of the last
      two axes, as (16, 16); fp8 has one scale for the tensor unless given 128 or (128, 128).
    - axis: the dimension that blocks lie along, -1. A matrix product's operands have theirs along its contraction.
    - scale_mode: mx "floor", "ceil", "even", "rceil"; fp8 "exact", "unit", and those four.
    - rounding: "even", "away", "stochastic"; hifp8 "away", "hybrid", "stochastic".
    - overflow: fp8 "saturate", "inf"; bf16, fp16, hifp8 "inf", "saturate". The others always saturate.
    - tensor_scale: nvfp4 True, False: whether there is a float32 scale of the tensor above the blocks'.
    - preset: "legacy" gives the predecessor's results for mxfp8, mxfp6, mxfp4 and hifp8.
    - generator: of the random bits of "stochastic"; None is torch's default one of the device.

    Raises FormatError, a ValueError, which names the option, its value and the allowed ones.
    """
    from capd_client.formats.encoding import encoded_as

    options = _options(elem, block, axis, scale_mode, rounding, overflow, tensor_scale, preset)
    return encoded_as(x, spec_of(fmt, options), generator)


def decode(encoded: Encoded) -> torch.Tensor:
    """The values of what `encode` gave, float32, of the payload's shape: element times scale times global scale."""
    from capd_client.formats.encoding import decoded

    return decoded(encoded)


def qdq(
    x: torch.Tensor,
    fmt: str,
    *,
    elem: Optional[str] = None,
    block: Block = None,
    axis: Optional[int] = None,
    scale_mode: Optional[str] = None,
    rounding: Optional[str] = None,
    overflow: Optional[str] = None,
    tensor_scale: Optional[bool] = None,
    preset: Optional[str] = None,
    generator: Optional[torch.Generator] = None,
) -> torch.Tensor:
    """Quantise and dequantise: decode(encode(x, …)), rounded to x's dtype; without intermediate codes.

    Arguments and errors are those of `encode`. The result is contiguous, has x's shape, and requires no gradient.
    """
    from capd_client.formats.encoding import quantised

    options = _options(elem, block, axis, scale_mode, rounding, overflow, tensor_scale, preset)
    return quantised(x, spec_of(fmt, options), generator)


def _options(*values: Any) -> dict[str, Any]:
    return dict(zip(OPTIONS, values, strict=True))
