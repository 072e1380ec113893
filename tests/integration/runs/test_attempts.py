"""A job that continues a run becomes its next attempt, over restarts of the daemon, and takes as much as the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import capd
from tests.kit import forking
from tests.kit.daemon import DaemonProcess, Rank, daemons
from tests.kit.store.cli import run_capd

JOB = """
import torch, capd_client
torch.seed()
for step in range(6):
    for name in ("x", "y"):
        capd_client.capture(torch.randn(64, 64), tensor_name=name, iteration=step)
    capd_client.capture(torch.randn(512, 256), tensor_name="large", iteration=step)
"""
RECORDS = 18

Serve = Callable[..., DaemonProcess]


@pytest.fixture
def serve(tmp_path: Path, runtime_dir: Path) -> Iterator[Serve]:
    with daemons() as made:

        def start() -> DaemonProcess:
            made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock"))
            return made[-1]

        yield start


@pytest.fixture
def rank_of(runtime_dir: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(number: int = 0, **more: bytes) -> Rank:
        made.append(Rank(runtime_dir / "s.sock", rank=number, **more))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def leave(rank: Rank) -> None:
    rank.bye()
    rank.disconnect()


def attempts(store: Path) -> list[tuple[int, int]]:
    """Iteration and attempt of all records of the run."""
    [series] = capd.open(store / "run.zarr").find(attempt="all")
    return [(record.iteration, record.attempt) for record in series.records]


def test_a_second_job_is_the_next_attempt_and_is_told_what_it_continues(
    tmp_path: Path, serve: Serve, rank_of: Callable[..., Rank]
) -> None:
    daemon = serve()
    first = rank_of()
    welcome = first.connect()
    assert (welcome.attempt, welcome.held_before) == (0, 0)
    first.put(1, 2, 3)
    first.expect_acks(1, 2, 3)
    leave(first)

    second, other = rank_of(), rank_of(1)
    welcome = second.connect()
    assert (welcome.attempt, welcome.held_before) == (1, 3)
    second.put(1, 2)
    second.expect_acks(1, 2)
    assert other.connect().attempt == 1
    leave(other)
    leave(second)
    assert daemon.stop() == 0

    assert attempts(tmp_path / "store") == [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1)]
    run = capd.open(tmp_path / "store" / "run.zarr")
    [latest], [one] = run.find(), run.find(attempt=1)
    assert [(record.iteration, record.attempt) for record in latest.records] == [(3, 0), (1, 1), (2, 1)]
    assert [record.attempt for record in one.records] == [1, 1]
    assert len(run.to_pandas()) == 3
    assert len(run.to_pandas(attempt="all")) == 5
    assert "attempt 1 continues run run, which holds 3 records" in daemon.text()


def test_restarts_of_the_second_job_count_on(
    tmp_path: Path, serve: Serve, rank_of: Callable[..., Rank]
) -> None:
    daemon = serve()
    for own, attempt in ((0, 0), (1, 1), (0, 2), (1, 3)):
        rank = rank_of()
        assert rank.connect(attempt=own).attempt == attempt
        rank.put(7)
        rank.expect_acks(7)
        leave(rank)
    assert daemon.stop() == 0
    run = capd.open(tmp_path / "store" / "run.zarr")
    assert sorted(session.attempt for session in run.sessions) == [0, 1, 2, 3]


def test_a_rank_keeps_its_attempt_when_its_daemon_is_killed(
    tmp_path: Path, serve: Serve, rank_of: Callable[..., Rank]
) -> None:
    daemon = serve()
    first = rank_of()
    first.connect()
    first.put(1)
    first.expect_acks(1)
    leave(first)
    second = rank_of()
    second.connect()
    second.put(1)
    second.expect_acks(1)
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    second.disconnect()

    daemon = serve()
    assert second.connect().attempt == 1
    second.put(2)
    second.expect_acks(2)
    leave(second)
    assert daemon.stop() == 0
    assert attempts(tmp_path / "store") == [(1, 0), (1, 1), (2, 1)]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[str]]:
    """A run that three jobs wrote; the bytes of its shards after each, and what each job was told."""
    place = tmp_path_factory.mktemp("continued")
    (place / "job.py").write_text(JOB)
    sizes, said = [], []
    for _ in range(3):
        done = forking.run(
            [sys.executable, "-m", "capd", "run", "--store", "store", "--run-id", "run", "--no-watch", "--",
             sys.executable, "job.py"],
            cwd=place, capture_output=True, text=True, timeout=120, check=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("CAPD_")},
        )  # fmt: skip
        said.append(done.stderr)
        sizes.append(sum(path.stat().st_size for path in place.glob("store/run.zarr/*/*/*/*/*/data/c/**/0")))
    return place / "store" / "run.zarr", sizes, said


def test_each_job_that_continues_a_run_takes_as_much_on_disk_as_the_first(
    continued: tuple[Path, list[int], list[str]],
) -> None:
    """Small records share chunks: once, the chunk that a job continued stayed in the file beside the new one."""
    _, (first, second, third), _ = continued
    assert second <= 2 * first * 1.02
    assert third <= 3 * first * 1.02


def test_a_job_says_which_run_it_continues(continued: tuple[Path, list[int], list[str]]) -> None:
    _, _, (first, second, third) = continued
    assert "continues run" not in first
    assert f"continues run run, which holds {RECORDS} records; the new ones are its attempt 1" in second
    assert f"continues run run, which holds {2 * RECORDS} records; the new ones are its attempt 2" in third


def test_readers_count_one_attempt_unless_asked(continued: tuple[Path, list[int], list[str]]) -> None:
    run, _, _ = continued

    def counted(*options: str) -> tuple[int, int]:
        rows = run_capd("ls", run, "--json", *options).json
        return sum(row["records"] for row in rows), sum(row["raw_bytes"] for row in rows)

    one = counted()
    assert one[0] == RECORDS
    assert counted("--attempt", "1") == one
    assert counted("--attempt", "all") == (3 * one[0], 3 * one[1])
    assert run_capd("ls", run, "--attempt", "9").code == 5
    assert run_capd("ls", run, "--attempt", "some").code == 2
    assert run_capd("export", run, "--json").json["records"] == RECORDS
    assert run_capd("export", run, "--attempt", "all", "--json").json["records"] == 3 * RECORDS
    shown = run_capd("show", run, "*.x", "--json").json
    assert [record["attempt"] for record in shown["records"]] == [2] * 6
    assert len(run_capd("show", run, "*.x", "--attempt", "all", "--json").json["records"]) == 18
    assert run_capd("verify", run, "--json").json["ok"]


def test_a_rebuilt_catalog_counts_the_same_bytes(continued: tuple[Path, list[int], list[str]]) -> None:
    run, _, _ = continued
    before = run_capd("ls", run, "--attempt", "all", "--json").json
    [catalog] = run.glob(".capd/node=*/catalog.sqlite")
    copy = run.parent / "again" / "run.zarr"
    subprocess.run(["mkdir", "-p", str(copy.parent)], check=True)
    subprocess.run(["cp", "-a", str(run), str(copy)], check=True)
    (copy / catalog.relative_to(run)).unlink()
    assert run_capd("verify", copy, "--rebuild-catalog").code == 0
    after = run_capd("ls", copy, "--attempt", "all", "--json").json
    for old, new in zip(before, after, strict=True):
        # The share of a record is a whole number.
        assert abs(old.pop("stored_bytes") - new.pop("stored_bytes")) <= old["records"]
        assert old == new
