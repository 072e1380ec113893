"""NVFP4 against its formula in numpy with ml_dtypes' casts, and against torchao where both mean the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from capd.formats import decode, encode, qdq
from tests.kit.formats.oracle import same_bits
from tests.kit.formats.packages import nvfp4_through_torchao

FLOAT32_MAX = np.finfo(np.float32).max


def by_formula(blocks: np.ndarray, tensor_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale bytes and decoded values of float32 [blocks, n], one rounding after the other."""
    one = np.float32(1.0)
    with np.errstate(all="ignore"):
        amax_t = np.abs(blocks).max() if tensor_scale else np.float32(0.0)
        encode_scale = one if amax_t == 0 else min(np.float32(448 * 6) / amax_t, FLOAT32_MAX)
        wanted = np.abs(blocks).max(axis=1) * (encode_scale * np.float32(1 / 6))
        stored = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        after = stored.astype(np.float32) * (one / encode_scale)
        before = np.minimum(one / after, FLOAT32_MAX)
        elements = np.clip(blocks * before[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        return stored.view(np.uint8), elements * after[:, None]


def rows(size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(-4, 1, 64)[:, None]
    found = torch.randn(64, 96, generator=generator) * spread * size
    found[3] = 0.0
    found[4, :16] = torch.tensor([0.0, -0.0] * 8)
    found[5] = torch.randint(-24, 25, (96,), generator=generator) / 4.0 * size
    return found


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e35])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tensor_scale", [True, False])
def test_blocks_of_sixteen_follow_the_formula(size: float, dtype: torch.dtype, tensor_scale: bool) -> None:
    values = rows(size).to(dtype)
    stored, expected = by_formula(values.float().numpy().reshape(-1, 16), tensor_scale)

    found = encode(values, "nvfp4", tensor_scale=tensor_scale)

    assert found.scale is not None
    assert (found.global_scale is not None) == tensor_scale
    assert torch.equal(found.scale, torch.from_numpy(stored).view(64, 6))
    assert same_bits(decode(found), torch.from_numpy(expected).view(64, 96))
    again = qdq(values, "nvfp4", tensor_scale=tensor_scale)
    assert same_bits(again.float(), torch.from_numpy(expected).view(64, 96).to(dtype).float())


@pytest.mark.parametrize("tensor_scale", [True, False])
def test_tiles_share_a_scale(tensor_scale: bool) -> None:
    values = rows()
    tiles = values.view(4, 16, 6, 16).transpose(1, 2).reshape(24, 256)
    stored, expected = by_formula(tiles.numpy(), tensor_scale)

    found = encode(values, "nvfp4", block=(16, 16), tensor_scale=tensor_scale)

    assert found.scale is not None
    assert torch.equal(found.scale, torch.from_numpy(stored).view(4, 6))
    joined = torch.from_numpy(expected).view(4, 6, 16, 16).transpose(1, 2).reshape(64, 96)
    assert same_bits(decode(found), joined)


def test_without_a_tensor_scale_blocks_are_torchaos() -> None:
    """torchao never makes a subnormal scale, and divides by 6 where this multiplies by 1/6."""
    values = rows(50.0).to(torch.bfloat16)
    their_scale, their_elements = nvfp4_through_torchao(values, None)

    found = encode(values, "nvfp4", tensor_scale=False)

    assert found.scale is not None
    same = found.scale == their_scale
    assert bool((same | (their_scale <= 0x08)).all())
    assert same.float().mean() > 0.8
    assert found.global_scale is None
    ours = decode(found).view(64, 6, 16)
    theirs = their_elements.view(64, 6, 16) * their_scale.view(torch.float8_e4m3fn).float()[..., None]
    assert same_bits(ours[same], theirs[same])


def test_with_a_tensor_scale_torchao_differs_by_the_last_place_at_most() -> None:
    values = rows()
    tensor_scale = values.abs().amax() / (448 * 6)
    their_scale, their_elements = nvfp4_through_torchao(values, tensor_scale)

    found = encode(values, "nvfp4")

    assert found.scale is not None
    same = (found.scale == their_scale) & (found.scale > 0x08)
    assert same.float().mean() > 0.5
    assert bool((same | ((found.scale.int() - their_scale.int()).abs() <= 1) | (their_scale <= 0x08)).all())
    theirs = (
        their_elements.view(64, 6, 16)
        * (their_scale.view(torch.float8_e4m3fn).float() * tensor_scale)[..., None]
    )
    torch.testing.assert_close(decode(found).view(64, 6, 16)[same], theirs[same], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("tensor_scale", [True, False])
def test_an_infinity_or_a_nan_costs_its_own_block_alone(bad: float, tensor_scale: bool) -> None:
    values = rows()[:2]
    without = values.clone()
    without[0, 16:32] = 0.0
    values[0, 20] = bad

    found = encode(values, "nvfp4", tensor_scale=tensor_scale)

    assert found.scale is not None
    assert found.scale[0, 1].item() == 0x7F
    got, expected = decode(found), qdq(without, "nvfp4", tensor_scale=tensor_scale)
    assert got[0, 16:32].isnan().all()
    got[0, 16:32] = 0.0
    assert same_bits(got, expected)


def test_a_tensor_of_zeros_stays() -> None:
    values = torch.tensor([[0.0, -0.0] * 8])
    found = encode(values, "nvfp4")
    assert found.global_scale is not None
    assert found.global_scale.item() == 1.0
    assert same_bits(decode(found), values)
