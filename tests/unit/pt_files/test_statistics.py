"""The numbers of tensor_info against torch, which computed tensor_saver's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from capd.pt_files.statistics import saved_statistics
from capd.store.format.statistics import public, summarise

INF, NAN = math.inf, math.nan


def of_torch(tensor: torch.Tensor) -> dict[str, float]:
    """As tensor_saver computed them, in float64 here, so that only formulas are compared."""
    if tensor.numel() == 0:
        return {"min": 0.0, "max": 0.0, "mean": 0.0, "std": 0.0}
    flat = tensor.to(torch.float64).flatten()
    std = flat.std() if flat.numel() > 1 else torch.tensor(NAN)
    return {"min": flat.min().item(), "max": flat.max().item(), "mean": flat.mean().item(), "std": std.item()}


VALUES: dict[str, Any] = {
    "random": np.random.default_rng(1).normal(size=300_000),
    "one": [2.5],
    "two": [1.0, 4.0],
    "none": [],
    "constant": [3.0] * 1000,
    "zeros": [0.0] * 10,
    "far from zero": 1000.0 + np.random.default_rng(2).normal(size=1000),
    "nan": [1.0, NAN, -2.0],
    "inf": [1.0, INF],
    "both": [INF, -INF, NAN],
    "negative inf": [-INF, 5.0, 6.0],
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats_have_torchs_numbers(name: str, dtype: torch.dtype, known: bool) -> None:
    tensor = torch.tensor(np.array(VALUES[name])).to(dtype)
    bits = tensor.view(torch.uint16).numpy() if dtype is torch.bfloat16 else tensor.numpy()
    label = str(dtype).removeprefix("torch.")
    stats = public(summarise(bits, label)) if known else None

    found = saved_statistics(bits, label, stats)

    assert found == pytest.approx(of_torch(tensor), rel=1e-7, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("known", [True, False])
def test_integers_bool_and_8_bit_floats_have_them_too(known: bool) -> None:
    for tensor in (
        torch.tensor([-3, 5, 7, 120], dtype=torch.int8),
        torch.tensor([True, False, True]),
        torch.tensor([1.5, -2.0, 448.0]).to(torch.float8_e4m3fn),
    ):
        label = str(tensor.dtype).removeprefix("torch.")
        bits = tensor.view(torch.uint8).numpy() if tensor.dtype is torch.float8_e4m3fn else tensor.numpy()
        stats = public(summarise(bits, label)) if known else None

        assert saved_statistics(bits, label, stats) == pytest.approx(of_torch(tensor))
