"""A job trained in a format, replayed in it: capture, formats, emulation and replay agree to the last bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forking
from tests.kit.jobs.layouts import Layout, run_layout
from tests.kit.jobs.products import assert_products_hold
from tests.kit.paths import REPOSITORY

JOB = str(Path(__file__).with_name("replayed_job.py"))
ROWS = """
[[rule]]
tensors = ["input", "weight", "output", "grad_output", "grad_input", "grad_weight"]
steps = "all"
"""


def capd(*args: str | Path, **environ: str) -> Any:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    done = forking.run(
        [sys.executable, "-m", "capd", *map(str, args)],
        env={**clean, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True, text=True, timeout=100, inner=forking.TRAINING,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def trained(directory: Path, dtype: str, quant_type: str, *options: str) -> Path:
    rules = directory / "rules.toml"
    rules.write_text(ROWS)
    capd(
        "run", "--store", directory, "--run-id", "r", "--quant-type", quant_type, "--",
        sys.executable, JOB, dtype, *options, CAPD_SELECT=str(rules),
    )  # fmt: skip
    assert_products_hold(directory / "r.zarr")
    return directory / "r.zarr"


def replayed(run: Path, recipes: str) -> Any:
    found = capd("replay", run, "--recipe", recipes, "--json", "--workers", "1")
    return json.loads(found.stdout)["all"]


@pytest.mark.parametrize(
    ("dtype", "quant_type"),
    [
        ("bfloat16", "mxfp8"),
        # All of it is deterministic: other formats by product, and other tiles of weights.
        pytest.param("bfloat16", "deepseek-v3", marks=pytest.mark.slow),
        pytest.param("bfloat16", "nvfp4", marks=pytest.mark.slow),
        pytest.param("float32", "mxfp4", marks=pytest.mark.slow),
        pytest.param("bfloat16", "hifp8", marks=pytest.mark.slow),
        pytest.param("bfloat16", "bf16", marks=pytest.mark.slow),
    ],
)
def test_the_captured_products_are_replayed_bit_for_bit(dtype: str, quant_type: str, tmp_path: Path) -> None:
    run = trained(tmp_path, dtype, quant_type)
    recipe = "none" if quant_type == "bf16" else quant_type
    found = replayed(run, f"{recipe},fp8")
    values = {"y": 150 * (160 + 64), "dx": 150 * 160, "dw": 160 * (96 + 64)}
    for name, numbers in found[recipe].items():
        captured = numbers["captured"]
        assert captured["values"] == captured["equal"] == 2 * values[name], (name, captured)
        assert (captured["max_ulp"], captured["nonfinite"]) == (0, 0)
    assert {one["captured"] for one in found["fp8"].values()} == {None}


@pytest.mark.slow
def test_a_bias_which_is_not_captured_is_told_from_a_difference(tmp_path: Path) -> None:
    found = replayed(trained(tmp_path, "bfloat16", "mxfp8", "bias"), "mxfp8")["mxfp8"]
    y, dx, dw = (found[name]["captured"] for name in ("y", "dx", "dw"))
    assert (y["calls"], y["biased"]) == (0, 4)
    assert dx["equal"] == dx["values"] > 0
    assert dw["equal"] == dw["values"] > 0


@pytest.mark.slow
def test_a_tensor_parallel_run_is_replayed_as_that_of_one_rank(tmp_path: Path) -> None:
    one = run_layout(Layout(ranks=1, swiglu=False, layers=2), tmp_path, "one")
    two = run_layout(Layout(tp=2, sp=True, ranks=2, swiglu=False, layers=2), tmp_path, "two")
    expected, found = (
        json.loads(capd("replay", run, "--recipe", "mxfp8,nvfp4", "--by", "module", "--json").stdout)
        for run in (one, two)
    )
    assert (expected["operands"], found["operands"]) == ("rank", "logical")
    groups = {each["module"]: each["recipes"] for each in expected["groups"]}
    compared = 0
    for group in found["groups"]:
        for recipe, products in group["recipes"].items():
            for product, numbers in products.items():
                one_rank = groups[group["module"]][recipe][product]
                assert numbers["calls"] == one_rank["calls"]
                # Operands differ by the order of additions; a value on an edge may round to the other side.
                assert numbers["sqnr_db"] == pytest.approx(one_rank["sqnr_db"], abs=0.2)
                compared += 1
    assert compared >= 2 * 4 * 2 * 3
