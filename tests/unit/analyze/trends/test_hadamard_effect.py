"""The effect of a Hadamard transform: against matrices of numpy, and on tensors of which it is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from capd.analyze.format_choice import choices
from capd.analyze.trends.hadamard_effect import HadamardEffect, block_crests, hadamard_effects
from capd.formats import qdq
from capd_client.formats.transforms.hadamard import seeded_signs

SIZES = (2, 4, 16, 32, 128)


def matrix(size: int) -> np.ndarray:
    """(-1)^(number of common one bits of row and column) / √size."""
    return np.array(
        [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    ) / math.sqrt(size)


def spiky(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    values[..., 3] *= 40
    return values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("label", ["mxfp4", "nvfp4", "hifp8"])
def test_each_number_is_that_of_both_tensors(label: str, dtype: torch.dtype) -> None:
    x = spiky(64, 256).to(dtype)
    signs = seeded_signs(32, 0).double().numpy()
    values = x.double().numpy()
    turned = (values.reshape(64, -1, 32) * signs @ matrix(32)).reshape(values.shape).astype(np.float32)

    numbers = hadamard_effects(x, choices(label), (32,))[0][f"{label} H32"].numbers()

    block = {"mxfp4": 32, "nvfp4": 16, "hifp8": 32}[label]
    for name, one in (("before", values), ("after", turned.astype(np.float64))):
        d = qdq(torch.from_numpy(one).float(), label).double().numpy() - one
        centred = one - one.mean()
        blocks = np.abs(one).reshape(-1, block)
        crest = np.log2(blocks.max(1) / np.sqrt((blocks**2).mean(1))).mean()
        spread = np.log2(blocks.max(1) / blocks.min(1)).mean()
        assert numbers[f"sqnr_db_{name}"] == pytest.approx(
            10 * math.log10((one**2).sum() / (d**2).sum()), abs=0.02
        )
        assert numbers[f"kurtosis_{name}"] == pytest.approx(
            (centred**4).mean() / (centred**2).mean() ** 2, rel=1e-4
        )
        assert numbers[f"block_crest_{name}"] == pytest.approx(crest, abs=1e-4)
        assert numbers[f"block_range_{name}"] == pytest.approx(spread, abs=0.01)


def test_a_spike_is_spread_evenly_and_normal_values_stay_normal() -> None:
    spike = torch.zeros(64, 32)
    spike[:, 5] = 7.0
    one = hadamard_effects(spike, choices("mxfp8"), (32,))[0]["mxfp8 H32"].numbers()
    # All magnitudes are 7 / √32 afterwards.
    assert one["block_crest_before"] == 2.5
    assert one["block_crest_after"] == pytest.approx(0, abs=1e-6)
    assert one["block_range_after"] == pytest.approx(0, abs=1e-6)
    normal = torch.randn(256, 512, generator=torch.Generator().manual_seed(3))
    other = hadamard_effects(normal, choices("mxfp4"), (16, 128))[0]
    for numbers in (found.numbers() for found in other.values()):
        assert numbers["kurtosis_after"] == pytest.approx(3, abs=0.1)
        assert numbers["gain_db"] == pytest.approx(0, abs=0.2)


def test_outliers_gain_from_a_transform() -> None:
    found = hadamard_effects(spiky(64, 256), choices("mxfp4"), (32,))[0]["mxfp4 H32"].numbers()
    assert found["kurtosis_after"] < found["kurtosis_before"]  # type: ignore[operator]
    assert found["block_crest_after"] < found["block_crest_before"]  # type: ignore[operator]


def test_sizes_that_do_not_fit_and_nan_say_so() -> None:
    found, problems = hadamard_effects(torch.ones(4, 48), choices("mxfp4,mxfp8:axis=5"), (16, 32))
    assert list(found) == ["mxfp4 H16"]
    assert [problem.partition(" ")[0] for problem in problems] == ["mxfp8:axis=5:", "mxfp4:"]
    assert hadamard_effects(torch.full((1, 32), math.nan), choices("mxfp4"), (16,)) == (
        {}, ["a transform spreads its NaN or Inf over a whole block"],
    )  # fmt: skip


@pytest.mark.parametrize("values", [torch.zeros(2, 32), torch.zeros(0, 32)])
def test_zeros_and_empty_tensors_have_no_range(values: torch.Tensor) -> None:
    [one] = hadamard_effects(values, choices("mxfp4"), (16,))[0].values()
    numbers = one.numbers()
    assert (numbers["gain_db"], numbers["block_range_before"], numbers["kurtosis_after"]) == (
        None,
        None,
        None,
    )


def test_parts_merge_to_the_whole_and_leave_each_other_alone() -> None:
    parts = [spiky(16, 64, seed=seed) for seed in range(4)]
    measured = [hadamard_effects(part, choices("mxfp4"), (16, 32))[0] for part in parts]
    whole = hadamard_effects(torch.cat(parts), choices("mxfp4"), (16, 32))[0]
    for label, expected in whole.items():
        merged = HadamardEffect()
        for one in measured:
            merged.add(one[label])
        assert merged.records == 4
        assert merged.numbers() == pytest.approx(expected.numbers(), rel=1e-9)
    before = measured[0]["mxfp4 H32"].numbers()
    measured[0]["mxfp4 H16"].add(measured[1]["mxfp4 H16"])
    assert measured[0]["mxfp4 H32"].numbers() == before


def test_the_fill_of_a_block_counts_in_no_mean() -> None:
    x = torch.full((1, 40), 2.0)
    found = block_crests(x, choices("mxfp4")[0].spec)
    assert (found.blocks, found.crests.value, found.ranges.value) == (2, 0, 0)
