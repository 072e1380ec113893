"""What a format does not take: the error names the option, its value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from capd.formats import FORMATS, FormatError, encode, qdq
from capd_client.formats.spec import spec_of

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("fp7", {}, f"fmt cannot be 'fp7'; allowed are {', '.join(FORMATS)}"),
    ("mxfp8", {"elem": "e3m2"}, "elem of mxfp8 cannot be 'e3m2'; allowed are e4m3, e5m2"),
    ("mxfp8", {"scale_mode": "up"}, "scale_mode of mxfp8 cannot be 'up'; allowed are floor, ceil, even, rceil"),
    ("mxfp4", {"rounding": "hybrid"}, "rounding of mxfp4 cannot be 'hybrid'; allowed are even, away, stochastic"),
    ("hifp8", {"rounding": "even"}, "rounding of hifp8 cannot be 'even'; allowed are away, hybrid, stochastic"),
    ("hifp8", {"overflow": "wrap"}, "overflow of hifp8 cannot be 'wrap'; allowed are inf, saturate"),
    ("mxfp8", {"overflow": "inf"}, "mxfp8 takes no overflow; it was given 'inf'"),
    ("bf16", {"elem": "e4m3"}, "bf16 takes no elem; it was given 'e4m3'"),
    ("hifp8", {"block": 32}, "hifp8 has no scales, so it takes no block; it was given 32"),
    ("fp16", {"axis": 0}, "fp16 has no scales, so it takes no axis; it was given 0"),
    ("mxfp8", {"block": 0}, "block of mxfp8 cannot be 0; allowed are a number of values"),
    ("nvfp4", {"block": (16,)}, r"block of nvfp4 cannot be (16,); allowed are a number of values"),
    ("nvfp4", {"block": True}, "block of nvfp4 cannot be True; allowed are a number of values"),
    ("nvfp4", {"scale_mode": "floor"}, "nvfp4 takes no scale_mode; it was given 'floor'"),
    ("nvfp4", {"tensor_scale": "no"}, "tensor_scale of nvfp4 cannot be 'no'; allowed are True, False"),
    ("mxfp4", {"tensor_scale": True}, "mxfp4 takes no tensor_scale; it was given True"),
    ("mxfp4", {"axis": 1.5}, "axis of mxfp4 cannot be 1.5"),
    ("mxfp4", {"preset": "old"}, "preset of mxfp4 cannot be 'old'; allowed are legacy"),
    ("nvfp4", {"preset": "legacy"}, "nvfp4 has no legacy preset; formats with one are mxfp8, mxfp6, mxfp4, hifp8"),
    ("mxfp8", {"preset": "legacy", "scale_mode": "even"}, "scale_mode with preset='legacy' cannot be 'even'"),
    ("hifp8", {"preset": "legacy", "overflow": "inf"}, "overflow with preset='legacy' cannot be 'inf'"),
    ("mxfp8", {"axis": 2}, "axis of mxfp8 cannot be 2 for a tensor of shape (4, 8); allowed are -2 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "options", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_used_is_named(fmt: str, options: dict[str, Any], message: str) -> None:
    for function in (encode, qdq):
        with pytest.raises(FormatError) as caught:
            function(torch.zeros(4, 8), fmt, **options)
        assert str(caught.value).startswith(message)
        assert isinstance(caught.value, ValueError)


def test_tiles_lie_over_the_last_two_dimensions() -> None:
    with pytest.raises(FormatError, match="allowed are one of the last two dimensions"):
        qdq(torch.zeros(2, 16, 16), "nvfp4", block=(16, 16), axis=0)


@pytest.mark.parametrize(
    "values", [torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.float8_e4m3fn), [1.0]]
)
def test_other_tensors_are_refused_with_their_dtype(values: Any) -> None:
    with pytest.raises(
        FormatError, match=r"mxfp8 takes tensors of torch.bfloat16, .*; it was given (torch\.|list)"
    ):
        qdq(values, "mxfp8")


def test_an_option_that_is_none_is_the_default() -> None:
    values = torch.randn(4, 64)
    nothing: dict[str, Any] = dict.fromkeys(
        ("elem", "block", "axis", "scale_mode", "rounding", "overflow", "tensor_scale", "preset")
    )
    for fmt in FORMATS:
        assert torch.equal(qdq(values, fmt, **nothing), qdq(values, fmt))


BITS = [
    ("bf16", {}, 16), ("fp16", {}, 16), ("fp8", {}, 8), ("fp8", {"elem": "e5m2"}, 8), ("fp8", {"block": 128}, 8.25),
    ("fp8", {"block": (128, 128)}, 8 + 32 / 16384), ("mxfp8", {}, 8.25), ("mxfp6", {}, 6.25), ("mxfp4", {}, 4.25),
    ("mxfp4", {"preset": "legacy"}, 4.25), ("nvfp4", {}, 4.5), ("nvfp4", {"tensor_scale": False}, 4.5),
    ("nvfp4", {"block": (16, 16)}, 4 + 8 / 256), ("hif4", {}, 4.5), ("hifp8", {}, 8),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "options", "bits"), BITS)
def test_bits_per_value_count_the_scales_that_are_stored(
    fmt: str, options: dict[str, Any], bits: float
) -> None:
    x = torch.randn(256, 256)
    encoded = encode(x, fmt, **options)
    # Packed, an element of 4 or 6 bits has no byte of its own.
    element = {"mxfp6": 6, "mxfp4": 4, "nvfp4": 4, "hif4": 4}.get(fmt, 8 * encoded.payload.element_size())
    scales = 0 if encoded.scale is None or encoded.scale.ndim == 0 else 8 * encoded.scale.nbytes

    assert spec_of(fmt, options).bits_per_value == bits == element + scales / x.numel()
    assert {name for name, _, _ in BITS} == set(FORMATS)
