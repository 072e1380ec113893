"""The first hour with a GPU: facts, bits, compiled jobs and numbers.

Each step decides whether the next ones make sense.

    python benchmarks/gpu/gpu_first_hour.py [--state DIR] [--force] [--again STEP ...] [--only STEP ...] [--quick]

Each step is a separate process with a time limit. Its result is kept in the state folder, so that a second start
continues where the first one ended. The folder's page.md is written after every step. It has every figure with its
verdict, for docs/measurements.md. The script needs no network, and neither capd nor its packages need be installed.
Missing packages are reported at the beginning, and the steps that need them are skipped.

The exit code is 0 if every figure is met. It is 1 if a figure misses its bound or a step failed, and 2 without a
CUDA device. It is 3 if a result stops the hour: page locks that are refused or delay others for more than 100 ms, or
failed tests. `--force` continues. `--quick` runs all of it on the CPU and on stand-ins, and its figures mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.gpu_hour_page import page
from benchmarks.gpu.gpu_hour_steps import STEPS, Step, missing_packages
from benchmarks.gpu.gpu_runtime import NO_GPU

ROOT = Path(__file__).parents[2]
MISSED, STOPPED = 1, 3
# The end of the error of `gpu_machine.Accelerator`.
NOT_LOCKED = "was not page-locked"
Row = dict[str, Any]


class Hour:
    """The steps and their results in a folder, one JSON file each. Results of another machine do not count."""

    def __init__(self, state: Path, quick: bool) -> None:
        self._state = state
        self._quick = quick
        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
        self._machine = f"{gpu}, torch {torch.__version__}{', quick' if quick else ''}"
        state.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Row] = {}
        for step in STEPS:
            if (file := self._file(step.name)).exists():
                result = json.loads(file.read_text())
                # Figures of another machine say nothing about this one.
                if result["machine"] == self._machine:
                    self.results[step.name] = result

    def _file(self, name: str) -> Path:
        return self._state / f"{name}.json"

    def forget(self, names: Sequence[str]) -> None:
        """Forget the results of these steps, so that they run again."""
        for name in names:
            self.results.pop(name, None)
            self._file(name).unlink(missing_ok=True)

    def run(self, step: Step) -> Row:
        """Run a step unless it has a result. Returns its result."""
        if step.name not in self.results:
            result = self._measure(step)
            temporary = self._file(step.name).with_suffix(".new")
            temporary.write_text(json.dumps(result, indent=1) + "\n")
            # The file is either complete or absent.
            temporary.replace(self._file(step.name))
            self.results[step.name] = result
        return self.results[step.name]

    def write_page(self, stopped: str | None = None) -> Path:
        """Write the page of all results so far."""
        file = self._state / "page.md"
        file.write_text(page(STEPS, self.results, stopped))
        return file

    def _measure(self, step: Step) -> Row:
        with tempfile.TemporaryDirectory(prefix="capd-hour-") as directory:
            found = Path(directory) / "found.json"
            rate = self.results.get("numbers-transfer", {}).get("found", {}).get("link GB/s")
            script = str(ROOT / "benchmarks" / "gpu" / step.script)
            command = [sys.executable, script, "--json", str(found), *step.command(self._quick, rate)]
            started = time.monotonic()
            code, shown, problem = _run(command, step.limit_s)
            seconds = time.monotonic() - started
            result = json.loads(found.read_text()) if code == 0 and found.exists() else {}
        if code == 0 and not result:
            problem = "it wrote no result"
        return {
            "step": step.name, "machine": self._machine, "seconds": seconds, "found": result, "shown": shown,
            "problem": "" if result else problem or f"it ended with {code}",
        }  # fmt: skip


def _run(command: list[str], limit_s: int) -> tuple[int, str, str]:
    """Run a command. Returns exit code, standard output and the end of standard error.

    At the time limit, all processes that it started are ended with it.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        shown, problem = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        problem = f"it was not done within {limit_s} s"
        return 1, "", problem
    finally:
        _end(process)
    return process.returncode, shown, problem[-3000:]


def _end(process: subprocess.Popen[str]) -> None:
    """End the whole session of a process, including its daemons and ranks."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def say_what_is_missing() -> list[str]:
    """Print the missing packages and how to install them. Returns their names."""
    missing = missing_packages()
    if missing:
        names = " ".join(missing)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(f"not installed: {names}. Steps that need capd are left out. On a machine with a network:")
        print(f"  pip download --only-binary :all: --python-version {version} --no-deps -d wheels {names}")
        print("then here, and again with site on PYTHONPATH:")
        print(f"  {sys.executable} -m pip install --no-index --no-deps --find-links wheels -t site {names}\n")
    return missing


def go(hour: Hour, steps: Sequence[Step], bare: bool, force: bool) -> str | None:
    """Run the steps in order. Returns why it stopped before the last one, or None."""
    for step in steps:
        if bare and not step.bare:
            continue
        known = step.name in hour.results
        result = hour.run(step)
        verdict = result["problem"].strip().splitlines()[-1] if result["problem"] else "done"
        print(f"{step.name}: {verdict}, {result['seconds']:.0f} s{', known' if known else ''}", flush=True)
        reason = verdict if NOT_LOCKED in result["problem"] else None
        if not result["problem"]:
            reason = step.stops(result["found"])
        hour.write_page(None if force else reason)
        if reason is not None and not force:
            return reason
    return None


def missed(results: dict[str, Row]) -> bool:
    """Whether a step failed, or a figure misses its bound."""
    return any(
        result["problem"] or any(check["verdict"] == "MISSED" for check in result["found"].get("checks", []))
        for result in results.values()
    )


def main() -> None:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--state", type=Path, default=Path("gpu-first-hour"), metavar="DIR", help="of the results"
    )
    parser.add_argument("--force", action="store_true", help="go on where a result says to stop")
    parser.add_argument(
        "--again", nargs="+", choices=names, default=[], metavar="STEP", help="forget its result"
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="STEP", help=" ".join(names)
    )
    parser.add_argument("--quick", action="store_true", help="show on the CPU that it works")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.quick:
        print("no CUDA device was found: nothing was measured", file=sys.stderr)
        raise SystemExit(NO_GPU)
    missing = say_what_is_missing()
    hour = Hour(args.state, args.quick)
    hour.forget(args.again)
    stopped = go(hour, [step for step in STEPS if step.name in args.only], bool(missing), args.force)
    print(f"all figures: {hour.write_page(stopped)}")
    if stopped is not None:
        print(f"stopped: {stopped}. --force goes on", file=sys.stderr)
        raise SystemExit(STOPPED)
    raise SystemExit(MISSED if missed(hour.results) and not args.quick else 0)


if __name__ == "__main__":
    main()
