"""Runs transformers_job.py beside a daemon, with one version of transformers or another, and reads what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.transformers import transformers_oracle as oracle
from tests.kit.jobs.products import assert_products_hold
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon

__all__ = ["Ran", "Read", "trained"]

JOB = Path(__file__).with_name("transformers_job.py")

Read = Callable[[str], oracle.Captured]


@dataclass
class Ran:
    """What the job and the daemon left."""

    directory: Path
    store: Path

    def result(self, name: str) -> dict[str, Any]:
        path = self.directory / f"{name}.json"
        assert path.exists(), (self.directory / f"{name}.log").read_text()[-3000:]
        return json.loads(path.read_text())

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def reader(self) -> Read:
        """What reads the run of a scenario, once."""
        runs: dict[str, oracle.Captured] = {}

        def read(name: str) -> oracle.Captured:
            if name not in runs:
                assert self.result(name)["counters"]["committed"] > 0
                assert_products_hold(self.store / f"{name}.zarr")
                runs[name] = oracle.Captured(self.store / f"{name}.zarr")
            return runs[name]

        return read


@contextmanager
def trained(scenarios: Iterable[str], version: str = "") -> Iterator[Ran]:
    """The job of these scenarios, when it is done. version: a directory with another transformers."""
    with tempfile.TemporaryDirectory(prefix="capd-t-", dir="/tmp") as name:
        directory = Path(name)
        daemon = Daemon(directory / "store", directory).start()
        try:
            path = os.pathsep.join(filter(None, [version, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
            subprocess.run(
                [sys.executable, str(JOB), daemon.endpoint, str(directory), *scenarios],
                env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=800,
            )  # fmt: skip
            daemon.stop()
        finally:
            daemon.discard()
        yield Ran(directory, directory / "store")
