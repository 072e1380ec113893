"""`capd run` in front of scripts that know nothing of capd, and of some that do: real processes, one daemon for most.

The jobs run once for the module, a few at a time; what is expected of each follows from its options alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import capd as capd_package
from tests.integration.rules.zero_line_job import LAYERS, MICRO_BATCHES, Data, batches, net, train
from tests.kit import forking
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon

JOB = Path(__file__).with_name("zero_line_job.py")
pytestmark = pytest.mark.timeout(600)  # the first test waits for all the jobs

MODULES = [*(f"layers.{layer}" for layer in range(LAYERS)), "head"]
Record = tuple[int, str, str, int, int]  # rank, module, tensor_name, iteration, micro_batch


@dataclass
class Done:
    """A job that is over."""

    code: int
    seen: dict[str, Any]  # what it printed
    said: str  # stderr, capd's and the job's


def run(*command: str, capd: tuple[str, ...], inner: str = "", **environment: str) -> Done:
    """Run a job below `capd run`; its Python is forked if `inner` names what it imports."""
    around = [sys.executable, "-m", "capd", "run", *capd, "--"]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CAPD_", "PYTHON"))}
    done = forking.run(
        [*around, *command], env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=280, inner=inner,
    )  # fmt: skip
    printed = done.stdout.strip().splitlines()
    seen = json.loads(printed[-1]) if printed and printed[-1].startswith("{") else {}
    return Done(done.returncode, seen, done.stderr)


class Jobs:
    """All jobs of the module, done; `store` holds a run for each that captured."""

    def __init__(self, store: Path, directory: Path, environment: dict[str, str]) -> None:
        self.store, self.stores = store, {"plain": directory / "own"}
        here, script = sys.executable, str(JOB)
        other = stranger(directory / "stranger")
        torchrun = (here, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        forked = {
            **{name: (here, script, name) for name in ("compiled", "watched_late", "captures", "evaluates")},
            "ddp": (*torchrun, script, "ddp"),
        }
        cold = {"stranger": (other, script, "plain"), "isolated": (here, "-I", "-c", "")}
        with ThreadPoolExecutor(3) as pool:
            futures = {
                name: pool.submit(
                    run, *command, capd=("--attach", "--run-id", name), inner=inner, **environment
                )
                for commands, inner in ((forked, forking.TRAINING), (cold, ""))
                for name, command in commands.items()
            }
            futures["unwatched"] = pool.submit(
                run, here, "-c", "", capd=("--attach", "--no-watch", "--run-id", "no"), **environment
            )
            own = ("--store", str(directory / "own"), "--run-id", "plain")  # of a daemon of its own
            futures["plain"] = pool.submit(
                run,
                here,
                "-m",
                "tests.integration.rules.zero_line_job",
                "plain",
                capd=own,
                inner=forking.TRAINING,
            )
            self.done = {name: future.result() for name, future in futures.items()}

    def records(self, name: str) -> list[Record]:
        """What the run holds."""
        return [
            (series.key.rank, series.key.module, series.key.tensor_name, record.iteration, record.micro_batch)
            for series in capd_package.open(self.stores.get(name, self.store) / f"{name}.zarr").series
            for record in series.records
        ]


def stranger(directory: Path) -> str:
    """A Python with torch, but neither capd nor msgspec."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", directory], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if (
            not entry.name.startswith(("capd", "_capd", "msgspec", "_editable", "__editable__"))
            and entry.suffix != ".pth"
        ):
            (packages / entry.name).symlink_to(entry)
    return str(directory / "bin" / "python")


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with tempfile.TemporaryDirectory(prefix="capd-zero-") as name:
        directory = Path(name)
        runtime = directory / "run" / "capd"
        runtime.mkdir(parents=True, mode=0o700)
        daemon = Daemon(directory / "store", runtime).start()
        try:
            yield Jobs(daemon.store, directory, {"XDG_RUNTIME_DIR": str(directory / "run")})
            daemon.stop()
        finally:
            daemon.discard()


def first_step(*ranks: int, prefix: str = "") -> list[Record]:
    """What `watch(model)` captures by default, in order."""
    return sorted(
        (rank, prefix + module, tensor_name, 0, micro_batch)
        for rank in ranks
        for module in MODULES
        for tensor_name in ("input", "output", "grad_output", "weight")
        for micro_batch in range(MICRO_BATCHES if tensor_name != "weight" else 1)
    )


def test_a_script_that_knows_nothing_of_capd_is_captured(jobs: Jobs) -> None:
    done = jobs.done["plain"]

    assert done.code == 0, done.said
    assert sorted(jobs.records("plain")) == first_step(0)
    assert f"{len(first_step(0))} records in" in done.said


def test_each_rank_of_torchrun_is_captured(jobs: Jobs) -> None:
    assert jobs.done["ddp"].code == 0, jobs.done["ddp"].said
    assert sorted(jobs.records("ddp")) == first_step(0, 1)


def test_models_compiled_in_any_way_are_captured_and_compiled_once(jobs: Jobs) -> None:
    assert jobs.done["compiled"].code == 0, jobs.done["compiled"].said
    found = jobs.records("compiled")

    expected = [
        record
        for prefix in ("whole.", "in_place.", "in_function.")
        for record in first_step(0, prefix=prefix)
        if record[4] == 0
    ]
    assert sorted(found) == sorted(expected)
    assert jobs.done["compiled"].seen["frames"] == 2  # as without capd: two of them share a graph


def test_training_computes_the_same_and_torch_is_left_as_it_was(jobs: Jobs) -> None:
    seen = jobs.done["plain"].seen
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    model = net()
    losses = train(model, model, (x for x, _ in DataLoader(Data(), batch_size=None)))  # which draws a seed
    number = torch.rand(1).item()
    torch.set_num_threads(threads)
    torch.set_rng_state(before)

    assert seen["losses"] == losses
    assert seen["random"] == number
    assert seen["hooks"] == 0
    assert jobs.done["watched_late"].seen["losses"] == jobs.done["captures"].seen["losses"] == losses


def test_workers_and_children_of_the_job_are_inert(jobs: Jobs) -> None:
    seen = jobs.done["plain"].seen

    assert (seen["workers"], seen["child"]) == (False, "False")
    assert {record[0] for record in jobs.records("plain")} == {0}


def test_a_script_that_calls_watch_is_captured_as_it_says(jobs: Jobs) -> None:
    said = {(0, "head", "input", 1, micro_batch) for micro_batch in range(MICRO_BATCHES)}
    names = ("input", "output", "weight")
    dry_run = {(0, module, name, 0, 0) for module in MODULES for name in names}  # before the script spoke

    assert set(jobs.records("watched_late")) == said | dry_run


def test_a_script_that_only_captures_gets_its_captures(jobs: Jobs) -> None:
    found = jobs.records("captures")

    assert {(module, tensor) for _, module, tensor, _, _ in found} == {("", "x")}
    assert len(found) == len(batches())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("evaluates", "no training forward was seen"),
        ("isolated", "no Python of the job read capd's start-up file"),
        ("unwatched", "the job calls neither capd_client.watch nor capture, and watch is off"),
        ("stranger", "python has no msgspec; install it: "),
    ],
)
def test_where_nothing_is_captured_the_summary_says_why(jobs: Jobs, name: str, reason: str) -> None:
    done = jobs.done[name]

    assert done.code == 0, done.said
    assert "capd: nothing was captured: " in done.said
    assert reason in done.said
    assert "Traceback" not in done.said
    assert not (jobs.store / f"{name}.zarr").exists()


def test_a_python_that_lacks_what_capd_needs_trains_all_the_same(jobs: Jobs) -> None:
    assert jobs.done["stranger"].seen["losses"] == jobs.done["plain"].seen["losses"]
