"""A real training job, captured, and `capd metrics` on what it left: each number against numpy on the same records."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd as capd_package
from capd.formats import qdq
from tests.kit import forking
from tests.kit.processes import capd

JOB = Path(__file__).with_name("diverging_job.py")
STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("captures")
    command = ["run", "--store", str(root), "--run-id", "job", "--", sys.executable, str(JOB)]
    capd(*command, inner=forking.TRAINING, CAPD_STRICT="1")
    return root / "job.zarr"


@pytest.fixture(scope="module")
def measured(run: Path) -> dict[str, dict[str, Any]]:
    """The metrics of the run by module, by their words."""
    words = "noise-ratio,kurtosis,oscillation,channels,amax-history,rank,accumulation"
    done = capd(
        "metrics", str(run), "--metric", words, "--formats", "mxfp4", "--window", "1", "--by", "module,tensor_name",
        "--top", "2", "--json",
    )  # fmt: skip
    return {one["metric"]: one for one in json.loads(done.stdout)["metrics"]}


def group(found: dict[str, Any], **fields: str) -> dict[str, Any]:
    [one] = [one for one in found["groups"] if fields.items() <= one.items()]
    return one  # type: ignore[no-any-return]


def tensors(run: Path, tensor_name: str, module: str = "2") -> list[Any]:
    [series] = list(capd_package.open(run).find(tensor_name=tensor_name, module=module))
    return [record.torch() for record in series.records]


def test_each_step_of_a_gradient_has_its_ratio_and_kurtosis(run: Path, measured: dict[str, Any]) -> None:
    captured = tensors(run, "grad_output")
    ratios = group(measured["noise-ratio"], module="2", tensor_name="grad_output")["steps"]
    shapes = group(measured["kurtosis"], module="2", tensor_name="grad_output")["steps"]

    assert len(captured) == len(ratios) == len(shapes) == STEPS
    for x, ratio, shape in zip(captured, ratios, shapes, strict=True):
        values = x.double().numpy()
        noise = qdq(x, "mxfp4").double().numpy() - values
        centred = values - values.mean()
        assert ratio["ratio"] == pytest.approx(np.linalg.norm(values) / np.linalg.norm(noise), rel=1e-9)
        assert shape["kurtosis"] == pytest.approx((centred**4).mean() / (centred**2).mean() ** 2, rel=1e-9)


def test_weights_are_followed_from_step_to_step(run: Path, measured: dict[str, Any]) -> None:
    weights = tensors(run, "weight")
    found = group(measured["oscillation"], module="2", tensor_name="weight")["all"]
    moved = [(b.double() - a.double()).abs().sum() for a, b in itertools.pairwise(weights)]
    codes = [qdq(one, "mxfp4").double() for one in weights]
    turned = [(b - a).abs().sum() for a, b in itertools.pairwise(codes)]

    assert found["pairs"] == STEPS - 1
    assert found["weights"] == (STEPS - 1) * weights[0].numel()
    assert found["ratio"] == pytest.approx(float(sum(turned)) / float(sum(moved)), rel=1e-9)

    history = group(measured["amax-history"], module="2", tensor_name="weight")["all"]
    amax = [float(one.abs().max()) for one in weights]
    assert history["overflow_steps_percent"] == 50 * sum(b > a for a, b in itertools.pairwise(amax))


def test_activations_have_their_channels_and_spectrum(run: Path, measured: dict[str, Any]) -> None:
    captured = [one.double().numpy().reshape(-1, one.shape[-1]) for one in tensors(run, "input")]
    energies = [(one**2).sum(0) for one in captured]
    top = sum(np.sort(one)[-2:].sum() for one in energies)
    channels = group(measured["channels"], module="2", tensor_name="input")["all"]
    assert channels["energy_percent"] == pytest.approx(100 * top / sum(one.sum() for one in energies))

    sigma = [np.linalg.svd(one, compute_uv=False) for one in captured]
    expected = np.mean([(one**2).sum() / one[0] ** 2 for one in sigma])
    rank = group(measured["rank"], module="2", tensor_name="input")["all"]
    assert rank["stable_rank"] == pytest.approx(expected, rel=1e-5)


def test_the_products_of_the_job_are_found(measured: dict[str, Any]) -> None:
    found = measured["accumulation"]
    assert found["products"] == {"found": 3 * STEPS, "measured": 3 * STEPS, "left_out": 0}
    losses = [
        group(found, module="2", label=f"captured {name}")["all"]["sqnr_db"]
        for name in ("fp32", "14-bit", "bf16")
    ]
    assert losses == sorted(losses, reverse=True)
