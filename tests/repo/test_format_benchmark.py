"""The benchmarks of the number formats and of emulation run, compare equal results, and judge every bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.paths import REPOSITORY


def results(script: str, directory: Path) -> dict[str, Any]:
    """What the script writes with --json, of one round at its smallest sizes."""
    result = directory / "result.json"
    command = [sys.executable, f"benchmarks/{script}", "--quick", "--rounds", "1", "--json", str(result)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=100, capture_output=True)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.fault
def test_every_format_is_measured_and_every_bound_is_judged(tmp_path: Path) -> None:
    found = results("formats.py", tmp_path)

    assert all(row["qdq"] > 0 and row["encode"] > 0 for row in found["rows"])
    compared = {row["format"] for row in found["rows"] if "torchao" in row}
    assert compared == {"mxfp8 e4m3", "mxfp8 e5m2", "mxfp8 rceil", "mxfp6 e2m3", "mxfp6 e3m2", "mxfp4"}
    judged = [check["what"] for check in found["checks"]]
    for name in ("hifp8", "fp8", "mxfp8 e4m3", "mxfp4", "nvfp4"):
        assert f"{name}, 64 kB, MB/s" in judged
    assert sum("against torchao" in what for what in judged) == len(compared)


@pytest.mark.fault
def test_a_step_of_every_recipe_is_measured_against_the_bare_one(tmp_path: Path) -> None:
    rows = results("emulation.py", tmp_path)["rows"]

    assert [row["recipe"] for row in rows] == ["bare", "none", "fp8", "mxfp8", "mxfp4", "nvfp4", "hifp8"]
    assert rows[0]["of bare"] == 1
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["of bare"] > 1.1 for row in rows[2:])  # they do emulate
