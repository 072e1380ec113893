"""Real runs of a training job, compared: with themselves, and with one that a flipped bit leads elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import capd as capd_package
from capd.formats import qdq
from tests.kit import forking
from tests.kit.processes import capd

JOB = Path(__file__).with_name("diverging_job.py")
FLIPPED = 1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `first`, and `flipped`, with one bit of a weight changed."""
    root = tmp_path_factory.mktemp("captures")
    train(root, "first")
    train(root, "flipped", "--flip", str(FLIPPED))
    return root


def train(root: Path, run_id: str, *options: str) -> None:
    command = ["run", "--store", str(root), "--run-id", run_id, "--", sys.executable, str(JOB), *options]
    capd(*command, inner=forking.TRAINING, CAPD_STRICT="1")


def compared(*arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capd("compare", *map(str, arguments), "--json").stdout)
    return found


@pytest.mark.fault
def test_a_deterministic_job_is_captured_twice_bit_for_bit(store: Path) -> None:
    train(store, "again")

    found = compared(store / "first.zarr", store / "again.zarr")

    assert found["compared"] == found["left"]["records"] == found["right"]["records"] > 0
    assert found["all"]["identical"] == found["compared"]
    assert (found["first_divergence"], found["only_left"]["count"]) == (None, 0)


def test_a_flipped_bit_is_found_where_it_first_shows(store: Path) -> None:
    found = compared(store / "first.zarr", store / "flipped.zarr", "--first-divergence")
    whole = compared(store / "first.zarr", store / "flipped.zarr", "--by", "iteration")

    first = found["first_divergence"]
    assert (first["iteration"], first["module"], first["operation"]) == (FLIPPED, "2", "forward")
    assert first["tensor_name"] in ("weight", "output")  # whichever of the two was captured first
    assert whole["first_divergence"] == first
    same, changed, *_ = whole["groups"]
    assert same["identical"] == same["pairs"]
    assert 0 < changed["identical"] < changed["pairs"]  # what comes before the flipped weight is as it was


@pytest.mark.slow
def test_the_error_of_a_format_is_that_of_the_captured_tensors(store: Path) -> None:
    found = compared(store / "first.zarr", "--formats", "mxfp4", "--tensor", "weight", "--by", "module")

    series = capd_package.open(store / "first.zarr").find(tensor_name="weight")
    assert {group["module"] for group in found["groups"]} == {one.key.module for one in series}
    for one in series:
        x = torch.cat([one.torch(at).reshape(-1, one.shape[-1]) for at in range(len(one))])
        error = (qdq(x, "mxfp4").double() - x.double()).numpy()
        [group] = [group for group in found["groups"] if group["module"] == one.key.module]
        assert group["errors"]["mxfp4"]["mse"] == pytest.approx(np.square(error).mean(), rel=1e-9)


def test_the_error_of_products_is_that_of_the_layers_products_with_quantised_operands(store: Path) -> None:
    """X, W and dY of each call of three real nn.Linear; W is captured once an iteration."""
    verdict = compared(store / "first.zarr", "--formats", "mxfp8,hifp8")["verdict"]

    run = capd_package.open(store / "first.zarr")
    sums = {(fmt, name): [0.0, 0.0] for fmt in ("mxfp8", "hifp8") for name in ("Y", "dX", "dW")}
    calls = 0
    for series in run.find(tensor_name="input"):
        [weights] = run.find(tensor_name="weight", module=series.key.module)
        [gradients] = run.find(tensor_name="grad_output", module=series.key.module)
        for at in range(len(series)):
            calls += 1
            x, w, dy = series.torch(at).flatten(0, 1), weights.torch(at), gradients.torch(at).flatten(0, 1)
            for fmt, axes in (("mxfp8", ({"axis": 1}, {"axis": 0})), ("hifp8", ({}, {}))):
                rows, columns = axes
                products = {
                    "Y": (x @ w.T, qdq(x, fmt, **rows) @ qdq(w, fmt, **rows).T),
                    "dX": (dy @ w, qdq(dy, fmt, **rows) @ qdq(w, fmt, **columns)),
                    "dW": (dy.T @ x, qdq(dy, fmt, **columns).T @ qdq(x, fmt, **columns)),
                }
                for name, (exact, quantised) in products.items():
                    sums[fmt, name][0] += float(exact.double().square().sum())
                    sums[fmt, name][1] += float((exact.double() - quantised.double()).square().sum())
    assert verdict["calls"] == {"found": calls, "measured": calls, "partial": 0, "left_out": 0}
    assert calls == 9
    for one in verdict["formats"]:
        for name, errors in one["products"].items():
            signal, noise = sums[one["format"], name]
            assert errors["sqnr_db"] == pytest.approx(10 * np.log10(signal / noise), rel=1e-4), (
                one["format"],
                name,
            )
