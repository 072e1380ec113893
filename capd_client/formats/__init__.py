"""Number formats, exact to the bit: bf16, fp16, fp8, mxfp8, mxfp6, mxfp4, nvfp4, hif4 and hifp8.

    y = qdq(x, "mxfp8", elem="e4m3", axis=-1, scale_mode="rceil")
    encoded = encode(x, "nvfp4")            # encoded.payload, encoded.scale, encoded.global_scale
    y = decode(encoded)

The functions are pure torch, run on the tensor's own device outside autograd, and never change x. The module that
computes a format defines it and names its source: `unscaled` (bf16, fp16), `fp8`, `mx`, `nvfp4`, `hif8`, and `special`
for hif4 and other scales. `legacy` defines the preset of that name. docs/formats.md has one table of all formats.
Importing this package loads no torch; calling its functions does.
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
    outer: Optional[int] = None,
    shrink: Optional[float] = None,
    four_over_six: Optional[str] = None,
    amax_epsilon: Optional[float] = None,
    generator: Optional[torch.Generator] = None,
) -> Encoded:
    """Quantise `x` into codes and scales.

    An option that is None takes the format's default, which is the first value in each list below.

    Args:
        x: bfloat16, float16, float32 or float64; any shape, any strides. float64 is rounded to float32 first.
        fmt: One of FORMATS.
        elem: fp8, mxfp8: "e4m3", "e5m2"; mxfp6: "e2m3", "e3m2"; mxfp4, nvfp4: "e2m1".
        block: How many values along `axis` share a scale (mx 32, nvfp4 16). A tuple (rows, columns), such as
            (16, 16), is a tile of the last two axes. fp8 has one scale for the tensor unless `block` is 128 or
            (128, 128).
        axis: The dimension that blocks run along; default -1. For operands of a matrix product, use the contraction.
        scale_mode: mx: "floor", "ceil", "even", "rceil"; mxfp4 also "std"; fp8: "exact", "unit", and the four of mx.
        rounding: "even", "away", "stochastic"; nvfp4 also "eden"; hifp8: "away", "hybrid", "stochastic"; hif4: "away",
            "stochastic".
        overflow: fp8: "saturate", "inf"; bf16, fp16, hifp8: "inf", "saturate". The other formats always saturate.
        tensor_scale: nvfp4: True, False; whether the tensor has a float32 scale above the scales of its blocks.
        preset: "legacy" computes mxfp8, mxfp6, mxfp4 and hifp8 as tensor_saver's own quantisers did.
        outer: nvfp4: 128 values share a float32 scale instead of the tensor's. `encode` refuses it.
        shrink: mxfp4: a factor from 0.5 to 1 before rounding, undone afterwards. With 0.75 stochastic rounding never
            clips (Tseng et al., arXiv 2502.20586). `encode` refuses it.
        four_over_six: nvfp4: "mae", "mse"; each block maps its largest magnitude to 6 or 4 by this error.
        amax_epsilon: fp8: the least amax that a scale is computed of. DeepSeek-V3's kernel of activations has 1e-4.
        generator: Source of the random bits of "stochastic" and "eden". None is torch's default generator.

    Returns:
        The codes in x's shape, the scales, and the options that `decode` needs.

    Raises:
        FormatError: An option or x cannot be used. The message names the option, its value and the allowed values.
    """
    from capd_client.formats.encoding import encoded_as

    options = _options(
        elem, block, axis, scale_mode, rounding, overflow, tensor_scale, preset, outer, shrink, four_over_six,
        amax_epsilon,
    )  # fmt: skip
    return encoded_as(x, spec_of(fmt, options), generator)


def decode(encoded: Encoded) -> torch.Tensor:
    """Return the values that `encoded` represents, float32, in the payload's shape.

    A value is the element times its block's scale times the global scale.
    """
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
    outer: Optional[int] = None,
    shrink: Optional[float] = None,
    four_over_six: Optional[str] = None,
    amax_epsilon: Optional[float] = None,
    generator: Optional[torch.Generator] = None,
) -> torch.Tensor:
    """Quantise and dequantise: decode(encode(x, …)), rounded to x's dtype, without intermediate codes.

    Arguments and errors are those of `encode`.

    Returns:
        A contiguous tensor of x's shape and dtype, which requires no gradient.
    """
    from capd_client.formats.encoding import quantised

    options = _options(
        elem, block, axis, scale_mode, rounding, overflow, tensor_scale, preset, outer, shrink, four_over_six,
        amax_epsilon,
    )  # fmt: skip
    return quantised(x, spec_of(fmt, options), generator)


def _options(*values: Any) -> dict[str, Any]:
    return dict(zip(OPTIONS, values, strict=True))
