"""The upkeep of ranks that are gone: their memory goes at once, their row when it is complete."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import cast

import pytest

from capd.server.pipeline.pipeline import Pipeline
from capd.server.rank.arena import Arena
from capd.server.rank.rank import RankSession
from capd.server.rank.session import Session
from capd.server.runs.run import Run
from capd.server.runs.upkeep import Upkeep
from capd.store.catalog.rows import SessionRow
from capd.store.catalog.totals import Held
from capd_client.protocol.messages import Hello
from tests.kit.client.memory import NBYTES, memfd
from tests.kit.daemon import wait_for


class Store:
    """A pipeline that saves every row at once."""

    def save_session(self, run_id: str, row: SessionRow) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def forget(self, client: bytes) -> None:
        """A rank that has nothing in work."""


class Sealing(Store):
    """A pipeline that seals at once, and counts it."""

    def __init__(self) -> None:
        self.held = Held(records=6)
        self.seals = 0

    def run_stats(self, run_id: str) -> Held:
        return self.held

    def seal(self, run_id: str, *, is_last: bool) -> Future[None]:
        self.seals += 1
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_errors_that_come_after_a_seal_are_sealed_together_and_a_record_at_once() -> None:
    run, pipeline = Run("run", Path("/captures/run.zarr")), Sealing()
    upkeep = Upkeep(cast("Pipeline", pipeline), Lock(), 10.0)
    run.quiet_since = 0.0
    run.count(pipeline.held, 10.0)
    upkeep.seal(run, 10.0)
    upkeep.seal(run, 10.25)
    assert (pipeline.seals, run.sealed) == (1, True)
    # The lab measures for another 15 s. A tick of the clock comes four times a second.
    for tick in range(100):
        now = 10.5 + tick / 4
        pipeline.held = Held(records=6, error_records=min(tick, 60))
        run.count(pipeline.held, now)
        upkeep.seal(run, now)
    assert (pipeline.seals, run.sealed) == (3, True)
    pipeline.held = Held(records=7, error_records=60)
    run.count(pipeline.held, 36.0)
    upkeep.seal(run, 36.0)
    assert pipeline.seals == 4


def test_the_arena_of_a_dead_rank_goes_before_its_launcher_has_collected_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pages count for the container of the rank, which may start again; its exit code may take seconds."""
    monkeypatch.setattr("capd.server.process._COLLECTED_S", 1000.0)  # however slow this test is
    job = subprocess.Popen(["sleep", "600"])
    hello = Hello(
        protocol=2,
        client=os.urandom(16),
        connection=1,
        run_id="run",
        rank=0,
        pid=job.pid,
        arena_nbytes=NBYTES,
    )
    run = Run("run", Path("/captures/run.zarr"))
    fd = memfd()
    arena = Arena(fd, NBYTES)
    rank = RankSession(
        Session(hello.client, "run"), hello, arena, lambda *_: None, lambda *_: None, 0, run.steering
    )
    os.close(fd)
    try:
        assert rank.connect(hello, arena, os.pidfd_open(job.pid)) is None
        run.ranks[hello.client] = rank
        upkeep = Upkeep(cast("Pipeline", Store()), Lock(), 10.0)
        job.send_signal(signal.SIGKILL)
        wait_for(lambda: rank.process.ended, "the end of the process")
        rank.disconnect(hello.connection)

        def seen_dead() -> bool:
            upkeep.ranks(run, 0.0)
            return rank.died

        wait_for(seen_dead, "its death")
        upkeep.ranks(run, 1.0)
        assert (rank.arena_nbytes, list(run.ranks), run.finished) == (0, [hello.client], {})

        job.wait()
        upkeep.ranks(run, 2.0)
        upkeep.ranks(run, 3.0)
        assert run.ranks == {}
        assert run.finished[hello.client].end in ("SIGKILL", "")
    finally:
        job.kill()
        job.wait()
