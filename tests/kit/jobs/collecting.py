"""Collection runs of `capd run`: their command, their state and the processes of their jobs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.kit.paths import REPOSITORY

JOB = (sys.executable, str(REPOSITORY / "tests" / "integration" / "collections" / "collect_job.py"))


def arguments(*options: str, job: tuple[str, ...] = JOB) -> list[str]:
    return [sys.executable, "-m", "capd", "run", "--store", "store", *options, "--", *job]


def state_of(run: Path) -> dict[str, dict[str, Any]]:
    state = json.loads((run.with_suffix(".collection") / "state.json").read_text())
    return {one["quant_type"]: one for one in state["types"]}


def jobs(directory: Path, word: str = "collect_job.py") -> list[int]:
    """Processes that were started in a directory and have this word in their command."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and Path(process / "cwd").readlink() == directory:
                command = (process / "cmdline").read_bytes()
                if word.encode() in command:
                    found.append(int(process.name))
        except OSError:
            continue
    return found
