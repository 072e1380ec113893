"""The benchmark of the number formats runs, compares equal results, and judges every bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.fault
def test_every_format_is_measured_and_every_bound_is_judged(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/formats.py", "--quick", "--rounds", "1", "--json", str(result)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=100, capture_output=True)

    found = json.loads(result.read_text())
    assert all(row["qdq"] > 0 and row["encode"] > 0 for row in found["rows"])
    compared = {row["format"] for row in found["rows"] if "torchao" in row}
    assert compared == {"mxfp8 e4m3", "mxfp8 e5m2", "mxfp8 rceil", "mxfp6 e2m3", "mxfp6 e3m2", "mxfp4"}
    judged = [check["what"] for check in found["checks"]]
    for name in ("hifp8", "fp8", "mxfp8 e4m3", "mxfp4", "nvfp4"):
        assert f"{name}, 64 kB, MB/s" in judged
    assert sum("against torchao" in what for what in judged) == len(compared)
