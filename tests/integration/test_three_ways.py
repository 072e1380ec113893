"""Every framework's client in three ways: found by `capd run`, with `watch` in the script, and recorded by an oracle.

All three must hold the same series, moments and bits from step 0 on. The oracle (three_ways_oracle.py) imports nothing
of capd and is told the moments by the script itself. A trial forward is no step in any of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration import three_ways_compare as compare
from tests.integration.launching import REPOSITORY, directories_of, needs
from tests.integration.three_ways_table import ROWS

JOB = Path(__file__).with_name("three_ways_job.py")
TENSORS = (
    "input", "weight", "query", "key", "value", "output",
    "grad_output", "grad_input", "grad_weight", "grad_query", "grad_key", "grad_value",
)  # fmt: skip
SETTINGS = f"[when]\nsteps = 'all'\n[[rule]]\ntensors = {list(TENSORS)}\n"
DEFAULT = [name for name, row in ROWS.items() if row.default]
SLOW = [name for name, row in ROWS.items() if not row.default]

pytestmark = pytest.mark.timeout(900)  # the first test waits for all the jobs


def run(directory: Path, names: list[str]) -> None:
    """Both trees of processes, side by side: what `capd run` is in front of, and the oracle's."""
    packages = {ROWS[name].package for name in names}
    path = [str(REPOSITORY), *(directories_of(package) for package in packages if package)]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    environment = {
        **inherited, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    settings = directory / "settings.toml"
    settings.write_text(SETTINGS)
    before = [sys.executable, "-m", "capd", "run", "--store", str(directory), "--config", str(settings), "--"]

    def start(before: list[str], ways: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, sys.executable, str(JOB), str(directory), ways, *names],
            env={**environment, "CAPD_ARENA_BYTES": str(16 << 20)}, capture_output=True, text=True, timeout=800,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        oracle = pool.submit(start, [], "oracle")
        captured = start(before, "found,watched")
    said = "".join(done.stdout + done.stderr for done in (captured, oracle.result()))
    (directory / "said.log").write_text(said)


@pytest.fixture(scope="module")
def default() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="capd-ways-", dir="/tmp") as name:
        run(Path(name), DEFAULT)
        yield Path(name)


@pytest.fixture(scope="module")
def slow() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="capd-ways-", dir="/tmp") as name:
        run(Path(name), SLOW)
        yield Path(name)


def check(directory: Path, name: str) -> None:
    """Of one row: all its processes ended well, trained the same, and hold the same."""
    row = ROWS[name]
    logs = "\n".join(
        f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(directory.glob(f"{name}.*.log"))
    )
    losses: dict[str, list[str]] = {}
    for way in ("found", "watched", "oracle"):
        for rank in range(row.ranks):
            path = directory / f"{name}.{way}.{rank}.losses"
            assert path.exists(), logs
            losses.setdefault(way, []).append(path.read_text())
    truth = compare.of_oracle(directory, name, row.ranks)
    found = compare.of_store(directory / f"{name}-found.zarr")
    watched = compare.of_store(directory / f"{name}-watched.zarr")

    wrong = {"found": compare.differences(found, truth), "watched": compare.differences(watched, truth)}
    assert not any(wrong.values()), "\n".join(
        f"{way}, {len(lines)} records: {line}" for way, lines in wrong.items() for line in lines[:12]
    )
    assert losses["found"] == losses["watched"] == losses["oracle"]
    keys = {way: compare.keys_of_store(directory / f"{name}-{way}.zarr") for way in ("found", "watched")}
    assert keys["found"] == keys["watched"]
    names = {where.tensor_name for where in truth}
    assert {"input", "weight", "output", "grad_output", "grad_weight"} <= names
    assert {where.iteration for where in truth} >= {0, 1}
    assert {where.micro_batch for where in truth} >= {0, 1}
    print(f"{name}: {len(truth)} records of {len(keys['found'])} series, {row.ranks} ranks: equal in three ways")


@pytest.mark.parametrize("name", DEFAULT)
def test_what_is_found_what_is_watched_and_what_an_oracle_sees_are_the_same(default: Path, name: str) -> None:
    check(default, name)
