"""The daemon that a job starts for itself: one per node, nobody's child, gone behind the job, with a sealed store."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

import capd
from capd.server.daemon import node_name
from tests.integration.embedded.embedded_job import StartJob, only_run, samples, spooled
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon, daemons_on, until


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "enhanced_tensor_logs"


def test_a_job_leaves_a_sealed_store_the_moment_it_is_over_and_the_daemon_ends_by_itself(
    start_job: StartJob, store: Path, runtime_dir: Path
) -> None:
    job = start_job()
    assert job.ask("save 0 5") is True
    assert len(daemons_on(store)) == 1
    assert "".join(job.ask("children")).split() == []  # nothing for a job to wait for, or to end
    job.leave()

    run = only_run(store)
    assert sum(series.zarr().shape[0] for series in capd.open(run).series) == 5
    assert spooled(run) == []
    until(lambda: not daemons_on(store), 20)
    assert [path.name for path in (runtime_dir / "capd").iterdir() if not path.name.endswith(".lock")] == []
    assert samples(run) == [(0, n) for n in range(5)]


def test_ranks_that_start_at_once_share_one_daemon_and_one_run(start_job: StartJob, store: Path) -> None:
    jobs = [start_job(LOCAL_RANK=str(rank)) for rank in range(3)]
    for job in jobs:
        job.tell("save 0 4")
    for job in jobs:
        assert job.hear() is True

    assert len(daemons_on(store)) == 1
    for job in jobs:
        job.leave()
    assert samples(only_run(store)) == [(rank, n) for rank in range(3) for n in range(4)]
    until(lambda: not daemons_on(store), 20)


@pytest.mark.fault
def test_the_daemon_outlives_the_rank_that_started_it_and_others_go_on(
    start_job: StartJob, store: Path
) -> None:
    first = start_job(LOCAL_RANK="0")
    assert first.ask("save 0 3") is True
    second = start_job(LOCAL_RANK="1")
    assert second.ask("save 0 3") is True
    (daemon,) = daemons_on(store)
    assert first.ask("flush") is True
    first.kill()

    assert second.ask("save 3 6") is True
    assert second.ask("flush") is True
    assert daemons_on(store) == [daemon]
    second.leave()
    until(lambda: not daemons_on(store), 40)
    run = only_run(store)
    assert samples(run) == [(0, n) for n in range(3)] + [(1, n) for n in range(6)]
    assert spooled(run) == []


@pytest.mark.fault
def test_a_killed_job_leaves_a_sealed_store_too(start_job: StartJob, store: Path) -> None:
    job = start_job(CAPD_IDLE_SEAL_S="0.5")
    assert job.ask("save 0 5") is True
    assert job.ask("flush") is True
    job.kill()

    until(lambda: not daemons_on(store), 40)
    run = only_run(store)
    assert spooled(run) == []
    assert sum(series.zarr().shape[0] for series in capd.open(run).series) == 5


@pytest.mark.fault
def test_the_next_job_makes_a_run_of_its_own(start_job: StartJob, store: Path) -> None:
    for _ in range(2):
        job = start_job()
        assert job.ask("save 0 2") is True
        job.leave()
        until(lambda: not daemons_on(store), 20)

    assert [samples(run) for run in store.glob("*.zarr")] == [[(0, 0), (0, 1)]] * 2


@pytest.mark.fault
def test_a_job_that_starts_while_the_daemon_of_the_one_before_leaves_gets_its_own(
    start_job: StartJob, store: Path
) -> None:
    first = start_job(CAPD_RUN_ID="first")
    assert first.ask("save 0 2") is True
    first.leave()
    for pid in daemons_on(store):
        os.kill(pid, signal.SIGTERM)
    second = start_job(CAPD_RUN_ID="second")
    assert second.ask("save 0 3") is True
    second.leave()

    assert samples(store / "second.zarr") == [(0, n) for n in range(3)]
    until(lambda: not daemons_on(store), 20)


@pytest.mark.slow
def test_a_store_that_a_daemon_is_still_leaving_is_waited_for(start_job: StartJob, store: Path) -> None:
    store.mkdir()
    with (store / f".capd-{node_name(None)}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = start_job()
        job.tell("save 0 3")
        until(lambda: daemons_on(store))  # the first one, which is refused
    assert job.hear() is True
    job.leave()

    assert samples(only_run(store)) == [(0, n) for n in range(3)]
    until(lambda: not daemons_on(store), 20)


@pytest.mark.fault
def test_a_daemon_that_has_the_store_already_is_joined(
    start_job: StartJob, store: Path, runtime_dir: Path
) -> None:
    daemon = Daemon(store, runtime_dir).start()
    try:
        job = start_job(CAPD_RUN_ID="run")
        assert job.ask("save 0 3") is True
        assert len(daemons_on(store)) == 1
        job.leave()
        daemon.stop()
    finally:
        daemon.discard()

    assert samples(store / "run.zarr") == [(0, n) for n in range(3)]


def test_without_the_rest_of_capd_the_job_runs_on_with_one_warning(
    start_job: StartJob, tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "capd"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('capd is not here')\n")
    job = start_job(PYTHONPATH=os.pathsep.join([str(broken.parent), str(REPOSITORY)]))

    assert job.ask("save 0 2") is False
    assert job.ask("save 2 3") is False
    said = job.leave()
    assert said.count("no daemon could be started") == 1
    assert "Traceback" in said  # of the daemon that was tried, not of the job


@pytest.mark.fault
def test_nodes_that_share_no_name_are_told_how_to(start_job: StartJob, store: Path) -> None:
    nodes = {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
    }
    unnamed = start_job(**nodes)
    assert unnamed.ask("save 0 2") is True
    assert "CAPD_RUN_ID=NAME on all of them" in unnamed.leave()
    named = start_job(**{**nodes, "TORCHELASTIC_RUN_ID": "job/7"})
    assert named.ask("save 0 2") is True
    assert "CAPD_RUN_ID" not in named.leave()

    assert samples(store / "job-7.zarr") == [(2, 0), (2, 1)]
    until(lambda: not daemons_on(store), 20)


@pytest.mark.slow
def test_a_saver_made_by_hand_starts_a_daemon_on_its_own_directory(
    start_job: StartJob, tmp_path: Path
) -> None:
    job = start_job(TENSOR_SAVE_ENABLED="")
    assert job.ask("save 0 1") is False  # nothing says on, but for the saver
    assert job.ask("own") is True
    job.leave()

    assert samples(only_run(tmp_path / "mine")) == [(0, 0)]
    until(lambda: not daemons_on(tmp_path / "mine"), 20)


def test_an_explicit_off_starts_nothing(start_job: StartJob, store: Path) -> None:
    for off in ({"CAPD_ENDPOINT": "off"}, {"TENSOR_SAVE_ENABLED": "False"}):
        job = start_job(**off)
        assert job.ask("save 0 2") is False
        assert job.ask("own") is False
        job.leave()

    assert not store.exists()
