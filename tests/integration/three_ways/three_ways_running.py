"""Runs rows of the matrix in their three ways, and compares what is left of each."""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.integration.three_ways import three_ways_compare as compare
from tests.integration.three_ways.three_ways_table import ROWS
from tests.kit import forking
from tests.kit.jobs.products import assert_products_hold
from tests.kit.launching import directories_of
from tests.kit.paths import REPOSITORY

__all__ = ["Done", "Runs"]

JOB = Path(__file__).with_name("three_ways_job.py")
TENSORS = (
    "input", "weight", "query", "key", "value", "output",
    "grad_output", "grad_input", "grad_weight", "grad_query", "grad_key", "grad_value",
)  # fmt: skip
SETTINGS = f"[when]\nsteps = 'all'\n[[rule]]\ntensors = {list(TENSORS)}\n"


class Done(NamedTuple):
    """A row that all ways have run. series: the whole keys of those found and those watched."""

    found: compare.Records
    watched: compare.Records
    oracle: compare.Records
    series: tuple[set[object], set[object]]


class Runs:
    """The rows that were asked for, run group by group: those of a group share the import of their frameworks."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._directories: dict[object, Path] = {}
        # Now: tests themselves do not see what names the packages.
        self._packages = {row.package: directories_of(row.package) for row in ROWS.values() if row.package}

    def of(self, name: str) -> Done:
        """Fails, with what its processes said, unless the row has trained the same in every way."""
        group = _group_of(name)
        if group not in self._directories:
            made = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="capd-ways-", dir="/tmp"))
            self._directories[group] = Path(made)
            names = [other for other in ROWS if _group_of(other) == group]
            _run(Path(made), names, self._packages.get(ROWS[name].package, ""))
        return _read(self._directories[group], name)


def _group_of(name: str) -> object:
    row = ROWS[name]
    return row.default or (row.package, row.ranks, row.imports)


def _run(directory: Path, names: list[str], packages: str) -> None:
    """Two trees of processes, side by side: one below `capd run`, and the oracle's. packages: directories of them."""
    path = [str(REPOSITORY), *filter(None, [packages])]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    environment = {
        **inherited, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "CAPD_ARENA_BYTES": str(8 << 20),
    }  # fmt: skip
    settings = directory / "settings.toml"
    settings.write_text(SETTINGS)
    before = [sys.executable, "-m", "capd", "run", "--store", str(directory), "--config", str(settings), "--"]

    def tree(before: list[str], ways: str) -> str:
        done = forking.run(
            [*before, sys.executable, str(JOB), str(directory), ways, *names],
            imports="" if before else forking.TRAINING, inner=forking.TRAINING if before else "",
            env=environment, capture_output=True, text=True, timeout=1500,
        )  # fmt: skip
        return done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        said = [pool.submit(tree, [], "oracle"), pool.submit(tree, before, "found,watched")]
    (directory / "said.log").write_text("".join(future.result() for future in said))


def _read(directory: Path, name: str) -> Done:
    ranks, ways = range(ROWS[name].ranks), ("found", "watched", "oracle")
    paths = {way: [directory / f"{name}.{way}.{rank}.losses" for rank in ranks] for way in ways}
    logs = sorted(directory.glob(f"{name}.*.log")) or [directory / "said.log"]
    assert all(path.exists() for of_way in paths.values() for path in of_way), "\n".join(
        f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs
    )
    losses = {way: [path.read_text() for path in paths[way]] for way in ways}
    assert losses["found"] == losses["watched"] == losses["oracle"], losses
    runs = [directory / f"{name}-{way}.zarr" for way in ("found", "watched")]
    for run in runs:
        assert_products_hold(run)
    found, watched = (compare.of_store(run) for run in runs)
    first, second = (compare.keys_of_store(run) for run in runs)
    return Done(found, watched, compare.of_oracle(directory, name, len(ranks)), (first, second))
