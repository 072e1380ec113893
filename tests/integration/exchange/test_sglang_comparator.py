"""sglang's own comparator opens exported runs, joins the parts of ranks, and finds the tensor that differs.

CAPD_TEST_SGLANG is the directory into which sglang 0.5.23, polars, einops, rich, pyzmq and orjson were installed with
`pip install --no-deps --target`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capd.cli.app import main
from tests.kit.exchange.layouts import JOINED, UNRELATED, laid_out_run, whole_run
from tests.kit.exchange.sharded import sharded_run
from tests.kit.paths import REPOSITORY

PACKAGES = os.environ.get("CAPD_TEST_SGLANG", "")
pytestmark = pytest.mark.skipif(
    not PACKAGES, reason="CAPD_TEST_SGLANG names no directory with sglang's comparator"
)


def exported(root: Path, factor: float) -> Path:
    return written(sharded_run(root / "captures", "exp", factor), root)


def written(run: Path, root: Path) -> Path:
    with pytest.raises(SystemExit) as end:
        main(["export", str(run), "--to", "sglang", "-o", str(root / "files")])
    assert not end.value.code
    return root / "files" / "exp"


def compared(
    baseline: Path, target: Path, report: Path, *options: str
) -> tuple[int, dict[str, bool], dict[str, Any]]:
    """The exit code, whether each tensor passed, and the summary."""
    command = [sys.executable, "-m", "tests.kit.exchange.sglang_comparator", PACKAGES]
    command += [
        "--baseline-path",
        str(baseline),
        "--target-path",
        str(target),
        "--report-path",
        str(report),
        *options,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    passed = {
        one["name"].partition("forward.")[2] or one["name"].rpartition(".")[2]: one["diff"]["passed"]
        for one in lines
        if one["type"] == "comparison_tensor"
    }
    return done.returncode, passed, lines[-1]


def test_parts_of_two_ranks_are_joined_and_equal_themselves(tmp_path: Path) -> None:
    run = exported(tmp_path, 1.0)

    code, passed, summary = compared(run, run, tmp_path / "report.jsonl")

    assert code == 0
    assert passed == {"weight": True, "input": True, "output": True, "grad_input": True}
    assert (summary["passed"], summary["failed"], summary["errored"], summary["skipped"]) == (4, 0, 0, 0)


def test_a_weight_that_is_a_tenth_larger_fails_alone(tmp_path: Path) -> None:
    first, second = exported(tmp_path / "a", 1.0), exported(tmp_path / "b", 1.1)

    code, passed, _ = compared(first, second, tmp_path / "report.jsonl")

    assert code != 0
    assert passed == {"weight": False, "input": True, "output": True, "grad_input": True}


def test_all_layouts_equal_one_rank_and_nothing_is_said_of_unknown_places(tmp_path: Path) -> None:
    one = written(whole_run(tmp_path / "one"), tmp_path / "one")
    several = written(laid_out_run(tmp_path / "several"), tmp_path / "several")

    for baseline, target in ((one, several), (several, one)):
        code, passed, summary = compared(baseline, target, tmp_path / "report.jsonl")
        assert (code, passed) == (0, dict.fromkeys(sorted(JOINED), True))
        assert (summary["failed"], summary["errored"], summary["skipped"]) == (0, 0, 1)

    code, passed, summary = compared(several, several, tmp_path / "raw.jsonl", "--preset", "raw")
    assert (code, passed[UNRELATED], summary["passed"]) == (0, True, 13)
