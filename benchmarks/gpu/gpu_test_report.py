"""Runs GPU tests and reports them as a step of the first hour: the number that passed, and the names of the others.

python benchmarks/gpu/gpu_test_report.py [--json FILE] -- PYTEST-ARGUMENTS
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.gpu.gpu_tables import Check, judged, markdown

ROOT = Path(__file__).parents[2]


def run(arguments: list[str]) -> dict[str, Any]:
    """Run pytest. Returns counts by outcome, names of failures, and the skipped tests with their reasons."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        # A machine's own torch may warn when it is imported, which would be an error here.
        command = [sys.executable, "-m", "pytest", "-W", "default", f"--junitxml={report}", *arguments]
        # The process group is this one's, which the hour ends at its time limit.
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        if not report.exists():
            raise SystemExit(
                f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 - written by the pytest above
    found: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
    for case in cases:
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        problem = next((case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None), None)
        skipped = case.find("skipped")
        if problem is not None:
            found["failed"][name] = (problem.text or problem.get("message") or "")[-1500:]
        elif skipped is not None:
            found["skipped"][name] = skipped.get("message", "")
        else:
            found["passed"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there")
    parser.add_argument("arguments", nargs="+", help="of pytest")
    args = parser.parse_args()
    found = run(args.arguments)
    markdown(
        ["passed", "failed", "skipped"], [[found["passed"], len(found["failed"]), len(found["skipped"])]]
    )
    for name, problem in found["failed"].items():
        print(f"FAILED {name}\n\n```\n{problem}\n```\n")
    for name, reason in found["skipped"].items():
        print(f"- skipped {name}: {reason}")
    checks = [
        Check("tests that failed", len(found["failed"]), 0),
        Check("tests that passed", found["passed"], 1, at_most=False),
    ]
    verdicts = judged(checks)
    if args.json is not None:
        args.json.write_text(json.dumps({**found, "checks": verdicts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
