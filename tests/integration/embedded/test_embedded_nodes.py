"""The daemons that a job starts for itself on several nodes, and on directories that cannot be written.

A node is a namespace with a host name and a runtime directory of its own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import capd
from tests.integration.embedded.embedded_job import Job, StartJob, only_run, samples, spooled
from tests.kit.launching import can_unshare
from tests.kit.processes import daemons_on, until
from tests.kit.tiers import rows

NODES, RANKS_OF_NODE = ("a", "b"), 2
RANKS = range(len(NODES) * RANKS_OF_NODE)
apart = pytest.mark.skipif(not can_unshare("--uts"), reason="namespaces may not be made here (needs root)")


@pytest.fixture
def ranks(start_job: StartJob, runtime_dir: Path) -> list[Job]:
    """Of two nodes with two ranks each, as torchrun describes them. Each has captured samples 0 and 1."""
    jobs = []
    for rank in RANKS:
        node, local_rank = divmod(rank, RANKS_OF_NODE)
        runtime = runtime_dir / NODES[node]
        runtime.mkdir(mode=0o700, exist_ok=True)
        inside = ["sh", "-c", f'hostname node-{NODES[node]}; exec "$@"', "sh"]
        jobs.append(
            start_job(
                "unshare", "--uts", *inside, XDG_RUNTIME_DIR=str(runtime), RANK=str(rank), LOCAL_RANK=str(local_rank),
                WORLD_SIZE=str(len(RANKS)), LOCAL_WORLD_SIZE=str(RANKS_OF_NODE), TORCHELASTIC_RUN_ID="job-7",
                CAPD_IDLE_SEAL_S="0.5",
            )
        )  # fmt: skip
    for job in jobs:
        job.tell("save 0 2")
    assert [job.hear() for job in jobs] == [True] * len(jobs)
    return jobs


def left_behind(runtime_dir: Path) -> list[Path]:
    """What is there but the locks, which stay."""
    return [path for path in runtime_dir.glob("*/capd/*") if path.suffix != ".lock"]


def check(store: Path, expected: list[tuple[int, int]], runtime_dir: Path) -> None:
    """One sealed run of both nodes, and nothing else."""
    until(lambda: not daemons_on(store), 40)
    run = store / "job-7.zarr"
    assert only_run(store) == run
    assert {path.name for path in run.glob(".capd/node=*")} == {f"node=node-{node}" for node in NODES}
    assert samples(run) == expected
    assert sum(series.zarr().shape[0] for series in capd.open(run).series) == len(expected)
    assert spooled(run) == []
    assert left_behind(runtime_dir) == []


@pytest.mark.slow
@apart
def test_each_node_has_one_daemon_and_no_two_ranks_merge(
    ranks: list[Job], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "enhanced_tensor_logs"
    assert len(daemons_on(store)) == len(NODES)
    for rank in ranks:
        rank.leave()

    check(store, [(rank, n) for rank in RANKS for n in range(2)], runtime_dir)


@pytest.mark.fault
@apart
def test_a_node_that_loses_all_its_ranks_costs_the_other_nothing(
    ranks: list[Job], tmp_path: Path, runtime_dir: Path
) -> None:
    store = tmp_path / "enhanced_tensor_logs"
    for rank in ranks:
        assert rank.ask("flush") is True
    for rank in ranks[:RANKS_OF_NODE]:
        rank.kill()
    until(lambda: len(daemons_on(store)) == 1, 40)
    for rank in ranks[RANKS_OF_NODE:]:
        assert rank.ask("save 2 4") is True
        rank.leave()

    check(store, [(rank, n) for rank in RANKS for n in range(2 if rank < 2 else 4)], runtime_dir)


@pytest.mark.slow
@apart
def test_all_ranks_of_all_nodes_killed_leave_a_sealed_store(
    ranks: list[Job], tmp_path: Path, runtime_dir: Path
) -> None:
    for rank in ranks:
        assert rank.ask("flush") is True
    for rank in ranks:
        rank.kill()

    check(tmp_path / "enhanced_tensor_logs", [(rank, n) for rank in RANKS for n in range(2)], runtime_dir)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "read-only"
    directory.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(directory)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing may be mounted here (needs root)")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def goes_on_without(job: Job) -> None:
    assert job.ask("save 0 2") is False
    assert job.ask("save 2 4") is False
    said = job.leave()
    assert said.count("capture is off") == 1
    assert "Choose another TENSOR_SAVE_DIR" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("directory", rows(["file", "file/below", "/proc/nowhere"], ["file"]))
def test_on_a_directory_that_cannot_be_made_the_job_goes_on_with_one_warning(
    start_job: StartJob, tmp_path: Path, directory: str
) -> None:
    (tmp_path / "file").touch()

    goes_on_without(start_job(TENSOR_SAVE_DIR=directory))


def test_on_a_read_only_file_system_the_job_goes_on_with_one_warning(
    start_job: StartJob, read_only: Path
) -> None:
    goes_on_without(start_job(TENSOR_SAVE_DIR=str(read_only / "logs")))


def test_a_directory_that_is_not_there_yet_is_made_for_its_owner_alone(
    start_job: StartJob, tmp_path: Path
) -> None:
    job = start_job(TENSOR_SAVE_DIR="some/new/place/mxfp8")
    assert job.ask("save 0 2") is True
    job.leave()

    store = tmp_path / "some" / "new" / "place"
    assert samples(only_run(store)) == [(0, 0), (0, 1)]
    assert not os.stat(only_run(store)).st_mode & 0o077
    until(lambda: not daemons_on(store), 20)
