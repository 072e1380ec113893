"""The sweep of one scale, against tensor_saver's formulas written down a second time, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from capd.analyze.distribution import Distribution, distribution_of
from capd.analyze.scale_sweep import SWEEP_ELEMENTS, elements_of, sweep_scales
from capd.errors import ConfigError
from capd_client.formats.elements import ELEMENTS


def grid_of(name: str) -> np.ndarray:
    element = ELEMENTS[name]
    values = {element.value(code) for code in range(element.sign_code)}
    return np.array(sorted(value for value in values if math.isfinite(value)))


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Ties away from zero, saturating."""
    magnitude = np.abs(values)
    at = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    low, high = grid[at - 1], grid[at]
    rounded = np.where(magnitude - low < high - magnitude, low, high)
    return np.copysign(np.minimum(rounded, grid[-1]), values)


def metrics(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    d = y - x
    mse, mae = (d**2).mean(), np.abs(d).mean()
    return {
        "mse": mse,
        "cosine": (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()),
        "psnr_db": 20 * np.log10(np.abs(x).max() / np.sqrt(mse)),
        "mae": mae,
        "relative": mae / np.abs(x).mean(),
    }


@pytest.mark.parametrize("name", SWEEP_ELEMENTS)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_a_sweep_is_tensor_savers(name: str, scale: float) -> None:
    spread = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * scale
    tensor = spread.to(torch.bfloat16)
    x = tensor.double().numpy()

    sweep = sweep_scales(distribution_of(tensor.view(torch.int16).numpy(), "bfloat16"), name)

    assert sweep is not None
    exponent_bits = {"e4m3": 4, "e5m2": 5, "e2m1": 2}[name]
    smallest_normal = {"e4m3": 2.0**-6, "e5m2": 2.0**-14, "e2m1": 1.0}[name]
    high = np.floor(np.log2(np.abs(x).max())) - (2 ** (exponent_bits - 1) - 1)
    low = np.floor(np.log2(np.abs(x[x != 0]).min() / smallest_normal))
    assert (sweep.max_align, sweep.min_align) == (high, low)
    assert sweep.exponents == pytest.approx(np.linspace(max(high, low), min(high, low), 21))
    found = []
    for exponent in sweep.exponents:
        factor = np.float32(2.0**exponent)
        scaled = (tensor.float().numpy() / factor).astype(np.float64)
        y = (nearest(scaled, grid_of(name)).astype(np.float32) * factor).astype(np.float64)
        found.append(metrics(x, y))
    for metric in found[0]:
        values = np.array([each[metric] for each in found])
        assert [getattr(errors, metric) for errors in sweep.errors] == pytest.approx(values, rel=1e-9)

    def share(metric: str) -> np.ndarray:
        values = np.array([each[metric] for each in found])
        return (values - values.min()) / (values.max() - values.min())

    cosine = np.array([each["cosine"] for each in found])
    score = .3 * (1 - share("mse")) + .3 * cosine + .2 * share("psnr_db") + .1 * (1 - share("mae"))  # fmt: skip
    score += 0.1 * (1 - share("relative"))
    assert sweep.scores == pytest.approx(score)
    assert sweep.recommended == score.argmax()
    assert sweep.best("mse") == share("mse").argmin()
    assert sweep.best("cosine") == cosine.argmax()


def test_what_fits_everywhere_scores_one_and_takes_the_largest_scale() -> None:
    sweep = sweep_scales(distribution_of(np.array([1.0, 2.0, -2.0], np.float32), "float32"), "e4m3")

    assert sweep is not None
    assert sweep.errors[0].psnr_db == math.inf
    assert (sweep.recommended, sweep.scores[0]) == (0, pytest.approx(1.0))


def test_nothing_finite_but_zero_has_no_sweep() -> None:
    zeros = np.array([0.0, -0.0, np.nan, np.inf], np.float32)

    assert sweep_scales(distribution_of(zeros, "float32"), "e4m3") is None
    assert sweep_scales(Distribution(), "e2m1") is None


def test_elements_go_by_their_names() -> None:
    assert elements_of("e4m3, e2m1,e4m3") == ("e4m3", "e2m1")
    with pytest.raises(
        ConfigError, match="unknown element 'mxfp8'; --sweep-scale takes e4m3, e5m2, e3m2, e2m3, e2m1"
    ):
        elements_of("mxfp8")
