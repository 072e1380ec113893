"""FP8 with float32 scales, of the tensor and of blocks, against torchao's scales and ml_dtypes' casts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from capd.formats import FormatError, decode, encode, qdq
from tests.kit.formats import packages  # noqa: F401 - silences what torchao says at its first import
from tests.kit.formats.oracle import same_bits

TYPES = {
    "e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2, 57344.0),
}


def cast(values: np.ndarray, elem: str) -> np.ndarray:
    _, package_type, largest = TYPES[elem]
    found: np.ndarray = np.clip(values, -largest, largest).astype(package_type).astype(np.float32)
    return found


def scaled(values: np.ndarray, elem: str) -> tuple[np.float32, np.ndarray]:
    """One block by the formula: the decoding scale and the values that come back."""
    before = np.float32(TYPES[elem][2] / np.float64(np.abs(values).max()))
    after = np.float32(1.0) / before
    return after, cast(values * before, elem) * after


@pytest.mark.parametrize("elem", TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3000.0])
def test_a_tensors_scale_is_torchaos_reciprocal(elem: str, dtype: torch.dtype, size: float) -> None:
    from torchao.float8.float8_utils import tensor_to_scale

    values = (torch.randn(130, 70, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
    theirs = tensor_to_scale(values, TYPES[elem][0])
    after, expected = scaled(values.float().numpy(), elem)

    found = encode(values, "fp8", elem=elem)

    assert found.scale is not None
    assert found.scale.shape == ()
    assert found.scale.item() == (1.0 / theirs).item() == after
    assert same_bits(decode(found), torch.from_numpy(expected))
    assert same_bits(qdq(values, "fp8", elem=elem).float(), torch.from_numpy(expected).to(dtype).float())


@pytest.mark.parametrize("elem", TYPES)
@pytest.mark.parametrize("block", [128, (128, 128)])
def test_each_block_has_its_own_scale(elem: str, block: int | tuple[int, int]) -> None:
    values = torch.randn(256, 300, generator=torch.Generator().manual_seed(2)) * torch.logspace(-9, 9, 300)
    height = 1 if isinstance(block, int) else 128
    found = encode(values, "fp8", elem=elem, block=block)
    assert found.scale is not None
    assert found.scale.shape == (256 // height, 3)
    got = decode(found)
    for top in range(0, 256, height):
        for left in range(0, 300, 128):
            where = (slice(top, top + height), slice(left, left + 128))
            after, expected = scaled(values[where].numpy(), elem)
            assert found.scale[top // height, left // 128].item() == after
            assert same_bits(got[where], torch.from_numpy(expected))


@pytest.mark.parametrize("special", [0.0, torch.inf, torch.nan])
def test_a_block_without_a_usable_magnitude_is_not_scaled(special: float) -> None:
    values = torch.tensor([special, -0.0, 0.0] if special == 0.0 else [special, -1.0625, 500.0])

    found = encode(values, "fp8")

    assert found.scale is not None
    assert found.scale.item() == 1.0
    expected = [special, -0.0, 0.0] if special == 0.0 else [special, -1.0, 448.0]
    expected[0] = 448.0 if special == torch.inf else expected[0]
    assert same_bits(decode(found), torch.tensor(expected))


def test_tiny_magnitudes_do_not_overflow_their_scale() -> None:
    values = torch.tensor([1e-45, -1e-45, 0.0])
    found = encode(values, "fp8")
    assert found.scale is not None
    assert found.scale.item() == (1.0 / torch.tensor(torch.finfo(torch.float32).max)).item()
    assert decode(found).isfinite().all()


@pytest.mark.parametrize(
    ("mode", "scale"), [("floor", 2.0**-8), ("ceil", 2.0**-7), ("even", 2.0**-7), ("rceil", 2.0**-7)]
)
def test_scales_may_be_powers_of_two(mode: str, scale: float) -> None:
    values = torch.tensor([1.97, -1.0, 0.01])

    found = encode(values, "fp8", scale_mode=mode)

    assert found.scale is not None
    assert found.scale.item() == scale
    expected = cast(values.numpy() / np.float32(scale), "e4m3") * np.float32(scale)
    assert same_bits(decode(found), torch.from_numpy(expected))


@pytest.mark.parametrize("block", [128, (128, 128)])
def test_the_least_amax_is_that_of_the_formula(block: int | tuple[int, int]) -> None:
    """s = max(amax, 1e-4) / 448 of DeepSeek-V3's act_quant, and the power of two above it."""
    x = (
        torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
        * torch.logspace(-12, 3, 256)[:, None]
    )
    x[:, 128:] = 0.0
    tiles = x.view(2, 128, 2, 128) if isinstance(block, tuple) else x.view(256, 1, 2, 128)
    s = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / torch.tensor(448.0)
    for mode, wanted in (("exact", s), ("rceil", torch.exp2(torch.ceil(torch.log2(s.double()))).float())):
        values = (tiles / wanted).numpy()
        expected = (torch.from_numpy(cast(values, "e4m3")) * wanted).view_as(x)
        found = encode(x, "fp8", block=block, scale_mode=mode, amax_epsilon=1e-4)
        assert found.scale is not None
        scales = wanted[:, 0, :, 0]
        assert torch.equal(decode(found), qdq(x, "fp8", block=block, scale_mode=mode, amax_epsilon=1e-4))
        if mode == "rceil":
            assert torch.equal(found.scale, scales)
            assert torch.equal(decode(found), expected)
        else:
            # S is rounded before 1 / S, so that a value near a tie may go to the other side.
            assert torch.allclose(found.scale, scales, rtol=2**-22, atol=0)
            close = torch.isclose(decode(found), expected, rtol=2**-21, atol=0)
            assert float(close.double().mean()) > 0.999


def test_a_least_amax_keeps_larger_blocks_and_invalid_values() -> None:
    x = torch.tensor([[1.0, -3.0], [1e-6, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    bounded, free = (qdq(x, "fp8", block=2, amax_epsilon=epsilon) for epsilon in (1e-4, None))
    assert same_bits(bounded[[0, 2, 3]], free[[0, 2, 3]])
    # 1e-6 * 448 / 1e-4 is 4.48, between 4 and 4.5.
    assert bounded[1].tolist() == pytest.approx([4.5 * 1e-4 / 448, 0.0])


@pytest.mark.parametrize(
    ("fmt", "options", "says"),
    [
        ("fp8", {"amax_epsilon": 0}, "from 1.2e-38 to 1e30"),
        ("fp8", {"amax_epsilon": float("nan")}, "from 1.2e-38 to 1e30"),
        ("fp8", {"amax_epsilon": True}, "from 1.2e-38 to 1e30"),
        ("fp8", {"amax_epsilon": 1e-4, "scale_mode": "unit"}, "not with unit"),
        ("mxfp8", {"amax_epsilon": 1e-4}, "mxfp8 takes no amax_epsilon"),
    ],
)
def test_a_least_amax_that_cannot_be_is_refused(fmt: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError, match=says):
        qdq(torch.ones(4), fmt, **options)
