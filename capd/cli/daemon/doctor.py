"""`capd doctor`: checks this machine, and sends every dtype through a temporary daemon and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from capd.cli.options import Json, flag
from capd.cli.output import print_json, print_lines
from capd.cli.table import prose

__all__ = ["doctor"]

ROUND_TRIP_TIMEOUT_S = 120.0
_LABEL = len("fail  ")


def doctor(
    quick: Annotated[bool, flag("--quick", "Leave out the round trip of every dtype.")] = False,
    as_json: Json = False,
) -> None:
    """Check this machine, the endpoint, and one round trip of every dtype.

    Checks versions, kernel features, the endpoint and its daemon, arena size and memory limits, CPUs, open files,
    the rank that a job would take, the store's disk, and the flight recorder's place. Then one tensor of every dtype
    goes through a temporary daemon and store, and the bits are compared. Every failure comes with what to do.

    \b
    Exit codes:
      1  something fails
    """
    from capd.cli.daemon.checks import CHECKS, Diagnosis
    from capd.cli.daemon.window_check import check_window
    from capd.config import load_daemon_settings

    settings = load_daemon_settings({})
    findings = [finding for check in (*CHECKS, check_window) for finding in check(settings)]
    dtypes = {} if quick else round_trip()
    if not quick:
        bad = [f"{dtype}: {problem}" for dtype, problem in dtypes.items() if problem != "ok"]
        detail = "; ".join(bad) if bad else f"{len(dtypes)} dtypes, bit for bit: {', '.join(dtypes)}"
        fix = "capture is not safe here; run with --json and report the details" if bad else ""
        findings.append(Diagnosis("round trip", "fail" if bad else "ok", detail, fix))
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print_json({"ok": not failed, "checks": checks, "dtypes": dtypes})
    else:
        for finding in findings:
            remedy = [f"      → {finding.fix}"] if finding.fix else []
            print_lines(prose([f"{finding.status:<4}  {finding.name}: {finding.detail}", *remedy], _LABEL))
    raise typer.Exit(1 if failed else 0)


def round_trip() -> dict[str, str]:
    """Send every dtype through a temporary daemon, in a subprocess. Return for each dtype "ok" or the problem."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "capd.cli.daemon.round_trip"],
            capture_output=True,
            text=True,
            timeout=ROUND_TRIP_TIMEOUT_S,
            env=keep,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"all": f"no result within {ROUND_TRIP_TIMEOUT_S:g} s"}
    try:
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = "; ".join(done.stderr.strip().splitlines()[-2:]) or "no message"
        return {"all": f"the round trip ended with code {done.returncode}: {last}"}
    return found
