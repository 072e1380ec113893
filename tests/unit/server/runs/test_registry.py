"""Runs come and go: what cannot be opened leaves nothing, what is forgotten still counts and can come back."""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

import capd
from capd.errors import NotAStore, StoreError
from capd.server.limits import DiskBudget
from capd.server.net.peer import Refusal
from capd.server.pipeline.pipeline import Pipeline
from capd.server.process import RETURN_S
from capd.server.rank.rank import RankSession
from capd.server.runs import registry as module
from capd.server.runs import upkeep
from capd.server.runs.names import RunNames
from capd.server.runs.registry import Registry
from capd.server.runs.root_lock import RootLock
from capd.server.runs.run import Run
from capd.store.catalog.rows import SessionRow
from capd.store.run.options import StoreOptions
from capd_client.protocol.control import StatsReply
from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Ack, Define, Descriptor, DropRow, Drops, Hello, Part, Put, encode
from tests.kit.client.memory import NBYTES, memfd, write

DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="bfloat16")


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    budget = DiskBudget(tmp_path, None, 0)
    made = Pipeline(tmp_path, "n", StoreOptions(), threads=1, staging_nbytes=1 << 20, budget=budget)
    yield made
    assert made.close(30)


@pytest.fixture
def registry(tmp_path: Path, pipeline: Pipeline) -> Iterator[Registry]:
    lock = RootLock(tmp_path, "n")
    yield Registry(tmp_path, "n", lock, RunNames(tmp_path, None, lock.previous), pipeline, idle_seal_s=0.0)
    lock.release()


def join(registry: Registry, run_id: str | None, process: int | None = None) -> RankSession:
    fd = memfd()
    try:
        hello = Hello(
            protocol=2, client=os.urandom(16), connection=1, run_id=run_id, rank=0, arena_nbytes=NBYTES
        )
        return registry.admit(hello, fd, process)
    finally:
        os.close(fd)


def write_and_leave(registry: Registry, run_id: str) -> None:
    rank = join(registry, run_id)
    assert rank.apply(1, lambda session: session.define(DEFINE, 10))
    assert rank.put(1, Put([Descriptor(1, 4096, 2, 0, (1,), Moment())]))
    assert rank.wait_idle(20)
    assert rank.end(1)


def failing(error: Exception) -> Callable[[str], None]:
    def open_run(_: str) -> None:
        raise error

    return open_run


def test_a_run_that_cannot_be_taken_up_leaves_nothing_behind(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "open_run", failing(StoreError("damaged")))
        with pytest.raises(StoreError, match="damaged"):
            registry.adopt("broken")

    assert registry.runs() == []
    assert registry.is_quiet()


def test_a_run_too_many_cannot_be_taken_up_and_that_is_an_error_of_the_store(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RUNS", 1)
    registry.adopt("first")
    with pytest.raises(StoreError, match="writes 1 runs already"):
        registry.adopt("second")
    assert [run.run_id for run in registry.runs()] == ["first"]


@pytest.mark.parametrize(
    ("error", "retry"),
    [(StoreError("locked", retry=True), True), (StoreError("damaged"), False), (NotAStore("newer"), False)],
)
def test_a_rank_tries_again_only_where_that_may_help(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, error: Exception, retry: bool
) -> None:
    monkeypatch.setattr(pipeline, "open_run", failing(error))
    with pytest.raises(Refusal) as refused:
        join(registry, "run")
    assert (refused.value.reject.code, refused.value.reject.retry) == ("run", retry)
    assert registry.runs() == []


def test_forgotten_runs_are_closed_still_count_and_can_be_reopened(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    def settled() -> bool:
        registry.tick()
        return registry.is_quiet()

    monkeypatch.setattr(module, "MAX_QUIET_RUNS", 0)
    write_and_leave(registry, "one")
    wait_until(lambda: registry.stored_nbytes() > 0 or registry.tick())
    wait_until(settled)
    wait_until(lambda: registry.tick() or not registry.runs())
    stored = registry.stored_nbytes()
    assert stored > 0
    wait_until(lambda: pipeline.open_runs() == [])
    assert registry.stats("one") == []

    write_and_leave(registry, "one")  # a new client: its record joins the first
    wait_until(lambda: registry.tick() or not registry.runs())
    assert registry.stored_nbytes() > stored
    wait_until(lambda: pipeline.open_runs() == [])
    pipeline.open_run("one")
    assert pipeline.run_stats("one").records == 2


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_moved_shards_count_no_more(
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: Callable[..., None],
    is_forgotten: bool,
) -> None:
    monkeypatch.setattr(module, "MAX_QUIET_RUNS", 0 if is_forgotten else 9)
    write_and_leave(registry, "one")
    wait_until(lambda: registry.tick() or (registry.is_quiet() and bool(registry.runs()) != is_forgotten))
    stored = registry.stored_nbytes()
    shard = tmp_path / "shard"
    shard.write_bytes(bytes(100))
    path = next((run.path for run in registry.runs()), None) or next(iter(registry._forgotten))
    registry.moved(path, shard.stat())
    assert registry.stored_nbytes() == stored - 100
    # A shard of an earlier daemon never counted.
    os.utime(shard, (1, 1))
    registry.moved(path, shard.stat())
    assert registry.stored_nbytes() == stored - 100
    shard.write_bytes(bytes(stored * 2))
    registry.moved(path, shard.stat())
    assert registry.stored_nbytes() == 0


def test_a_run_that_ranks_have_continued_is_not_the_first_that_is_forgotten(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    for run_id in ("one", "two", "one"):
        write_and_leave(registry, run_id)
        wait_until(lambda: registry.tick() or registry.is_quiet())
    monkeypatch.setattr(module, "MAX_QUIET_RUNS", 1)
    registry.tick()

    assert [run.run_id for run in registry.runs()] == ["one"]


def test_a_run_forgotten_in_the_tick_that_saw_its_seal_end_counts_as_it_was_sealed(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    real = upkeep.Upkeep.seal

    def seal(clock: upkeep.Upkeep, run: Run, now: float) -> None:
        """The seal begins and ends behind the clock's count of the run."""
        real(clock, run, now)
        if run.sealing is not None:
            run.sealing.result(20)
            real(clock, run, now)

    held: list[object] = []

    def close_run(run_id: str) -> Future[None]:
        held.extend([pipeline.run_stats(run_id), pipeline.overhead_nbytes(run_id)])
        return Future()

    monkeypatch.setattr(upkeep.Upkeep, "seal", seal)
    monkeypatch.setattr(module, "MAX_QUIET_RUNS", 0)
    monkeypatch.setattr(pipeline, "close_run", close_run)
    write_and_leave(registry, "one")
    [run] = registry.runs()
    wait_until(lambda: registry.tick() or not registry.runs())

    assert [run.totals, run.overhead_bytes] == held
    assert registry.stored_nbytes() == run.added_nbytes > 0


def test_a_rank_that_comes_while_its_forgotten_run_is_being_closed_gets_it_anew(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    registry.adopt("one")
    wait_until(lambda: registry.tick() or registry.is_quiet())
    monkeypatch.setattr(module, "MAX_QUIET_RUNS", 0)
    gate = threading.Event()
    busy = pipeline.post("one", lambda _: gate.wait(20))
    registry.tick()
    assert registry.runs() == []

    comer = threading.Thread(target=write_and_leave, args=(registry, "one"))
    comer.start()
    comer.join(0.2)
    assert comer.is_alive()  # it waits for the close
    gate.set()
    comer.join(20)

    assert busy.result()
    assert [run.totals.records for run in registry.runs() if not registry.tick()] == [1]
    wait_until(lambda: registry.tick() or not registry.runs())
    wait_until(lambda: pipeline.open_runs() == [])


def test_a_process_that_lives_on_without_a_connection_is_no_rank_any_more_until_it_comes_back(
    registry: Registry, wait_until: Callable[..., None]
) -> None:
    """After exec the process of a rank is another program: it holds up neither its memory nor the end of its run."""
    client, fd = os.urandom(16), memfd()
    hello = Hello(protocol=2, client=client, connection=1, run_id="one", rank=0, arena_nbytes=NBYTES)
    write(fd, struct.pack("3Q", 3, 0, 1), 8)  # offered 3, one in flight
    rank = registry.admit(hello, fd, os.pidfd_open(os.getpid()))
    rank.apply(1, lambda session: session.define(DEFINE, 10))
    rank.put(1, Put([Descriptor(1, 4096, 2, 0, (1,), Moment())]))
    assert rank.wait_idle(20)
    rank.disconnect(1)
    registry.tick()
    [run] = registry.runs()
    assert client in run.ranks  # it may knock again

    rank.process.lost_at -= RETURN_S + 1
    wait_until(lambda: registry.tick() or registry.is_quiet())
    assert run.ranks == {}
    ended = run.finished[client]
    assert (ended.state, ended.offered, ended.committed, ended.dropped) == ("died", 3, 1, {"rank_died": 2})

    hello.connection = 2
    again = registry.admit(hello, fd, None)
    os.close(fd)
    assert again.put(2, Put([Descriptor(1, 4096, 2, 0, (1,), Moment())]))
    [answer] = again.take_replies(2)
    assert answer == Ack([(1, 1)])  # known, and not written twice
    assert again.row().state == "live"
    assert client not in run.finished
    assert again.end(2)


def test_what_was_in_work_of_a_dead_rank_when_the_daemon_was_killed_is_accounted_for_by_the_next(
    tmp_path: Path, registry: Registry, pipeline: Pipeline
) -> None:
    write_and_leave(registry, "one")
    [run] = registry.runs()
    [rank] = run.ranks.values()
    dropped = {"arena_full": 1, "rank_died": 1}
    cut_off = replace(rank.row(), state="died", offered=9, committed=0, in_flight=7, dropped=dropped)
    assert not cut_off.clean
    pipeline.save_session("one", cut_off).result(20)

    lock = SimpleNamespace(note=SimpleNamespace(assigned_run=None))
    names = RunNames(tmp_path, None, lock.note)
    later = Registry(tmp_path, "n", cast("RootLock", lock), names, pipeline, idle_seal_s=0.0)
    later.adopt("one")

    [stats] = later.stats("one")
    assert (stats.offered, stats.committed, stats.in_flight, stats.clean) == (9, 1, 0, True)
    assert stats.dropped == {"arena_full": 1, "rank_died": 7}
    pipeline.post("one", lambda _: None).result(20)
    [session] = capd.open(tmp_path / "one.zarr").sessions
    assert (session.committed, session.in_flight, session.dropped) == (1, 0, stats.dropped)


def test_ranks_that_come_together_open_their_run_once(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank could die while another one still read the rows of earlier ranks.

    Its own row was among them. What it had in work was then counted as lost, and committed all the same.
    """
    reading, gate = threading.Event(), threading.Event()
    readings: list[object] = []
    real = module.read_sessions

    def read(db: sqlite3.Connection) -> list[SessionRow]:
        readings.append(db)
        if len(readings) == 1:
            reading.set()
            assert gate.wait(20)
        return real(db)

    monkeypatch.setattr(module, "read_sessions", read)
    first, second = (threading.Thread(target=write_and_leave, args=(registry, "one")) for _ in range(2))
    first.start()
    assert reading.wait(20)
    second.start()
    second.join(0.2)
    [run] = registry.runs()
    assert run.ranks == {}  # nobody is placed before the first one has read the rows
    gate.set()
    for comer in (first, second):
        comer.join(20)

    assert len(readings) == 1
    assert sorted(rank.row().committed for rank in run.ranks.values()) == [1, 1]


@pytest.mark.parametrize("stays", [True, False])
def test_a_seal_is_the_last_one_as_soon_as_every_rank_has_left(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    """A rank that left is in the registry until the clock has saved its row. Replaced chunks once stayed until then."""
    asked: list[bool] = []
    real = pipeline.seal

    def seal(run_id: str, *, is_last: bool) -> Future[None]:
        asked.append(is_last)
        return real(run_id, is_last=is_last)

    monkeypatch.setattr(pipeline, "seal", seal)
    staying = join(registry, "one") if stays else None
    write_and_leave(registry, "one")
    registry.seal("one").result(20)
    assert asked == [not stays]
    [run] = registry.runs()
    assert len(run.ranks) == 1 + stays
    if staying is not None:
        assert staying.end(1)


@pytest.mark.parametrize("look", [1, 2])
def test_the_row_of_a_rank_that_came_back_is_the_last_one(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """The clock finds the rank dead, and the rank comes back before the clock has saved that.

    look: the look of the clock at the dead rank's row after which the rank comes.
    """
    fd = memfd()
    hello = Hello(protocol=2, client=os.urandom(16), connection=1, run_id="one", rank=0, arena_nbytes=NBYTES)
    rank = registry.admit(hello, fd, os.pidfd_open(os.getpid()))
    rank.disconnect(1)
    rank.process.lost_at -= RETURN_S + 1
    rank.check_process(grace_s=0.0)
    again = threading.Thread(
        target=registry.admit,
        args=(msgspec.structs.replace(hello, connection=2), fd, os.pidfd_open(os.getpid())),
    )
    looks: list[SessionRow] = []
    states: list[str] = []
    save, row = pipeline.save_session, RankSession.row

    def note(run_id: str, saved: SessionRow) -> Future[None]:
        states.append(saved.state)
        return save(run_id, saved)

    def slow_row(asked: RankSession) -> SessionRow:
        answer = row(asked)
        looks.append(answer)
        if len(looks) == look:
            assert answer.state == "died"
            again.start()
            again.join(0.2)
        return answer

    monkeypatch.setattr(pipeline, "save_session", note)
    monkeypatch.setattr(RankSession, "row", slow_row)
    registry.tick()
    again.join(20)
    os.close(fd)
    assert states[-1] == "live"
    assert rank.end(2)


def test_the_session_of_a_record_is_known_before_the_clock_looked_at_it(
    registry: Registry, tmp_path: Path
) -> None:
    rank = join(registry, "r")
    assert rank.apply(1, lambda session: session.define(DEFINE, 10))
    assert rank.put(1, Put([Descriptor(1, 4096, 2, 0, (1,), Moment())]))
    assert rank.wait_idle(20)
    store = capd.open(tmp_path / "r.zarr")  # as a daemon killed now would leave it
    assert store.totals().records == 1
    assert [session.client for session in store.sessions] == [rank.client]


def test_of_many_ranks_that_lost_their_connection_the_first_are_given_up(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(upkeep, "MAX_LOST", 3)
    process = os.pidfd_open(os.getpid())
    ranks = [join(registry, "one", os.dup(process)) for _ in range(5)]
    os.close(process)
    for rank in ranks:
        rank.disconnect(1)
    [run] = registry.runs()
    wait_until(lambda: registry.tick() or len(run.ranks) == 3)
    assert list(run.ranks) == [rank.client for rank in ranks[2:]]
    assert [row.state for row in run.finished.values()] == ["died"] * 2
    for rank in ranks[2:]:
        rank.process.lost_at -= RETURN_S + 1
    wait_until(lambda: registry.tick() or registry.is_quiet())


def test_counters_beyond_all_measure_keep_nobody_from_the_counters(registry: Registry) -> None:
    most = 2**63 - 1
    for _ in range(8):
        fd = memfd()
        write(fd, b"\xff" * (PAGE_NBYTES - 8), 8)
        hello = Hello(
            protocol=2, client=os.urandom(16), connection=1, run_id="run", rank=0, arena_nbytes=NBYTES
        )
        rank = registry.admit(hello, fd, None)
        os.close(fd)
        assert rank.apply(1, lambda session: session.define(DEFINE, 10))
        assert rank.apply(1, lambda session: session.drops(Drops([DropRow(0, 0, most, most, 0, most)])))
        msgspec.msgpack.encode(rank.row())
    [stats] = registry.stats("run")
    encode(StatsReply(stats.model_dump(mode="json")))


def test_what_goes_wrong_on_the_append_thread_is_an_error_of_the_store(
    pipeline: Pipeline, registry: Registry
) -> None:
    def fail(error: Exception) -> Callable[[object], None]:
        def action(_: object) -> None:
            raise error

        return action

    join(registry, "run")
    for error in (sqlite3.DatabaseError("malformed"), ValueError("unforeseen")):
        with pytest.raises(StoreError, match=str(error)):
            pipeline.post("run", fail(error)).result(20)
    with pytest.raises(FileNotFoundError):
        pipeline.post("run", fail(FileNotFoundError())).result(20)
    pipeline.seal("run").result(20)


@pytest.mark.parametrize("payload", [True, False])
@pytest.mark.parametrize("nbytes", [8, 6 << 20])
def test_a_disk_that_cannot_read_parts_back_costs_their_record_alone(
    registry: Registry, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, payload: bool, nbytes: int
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    rank = join(registry, "run")
    assert rank.apply(1, lambda session: session.define(DEFINE, 10))
    firsts = range(0, nbytes, 4096)
    parts = [
        Descriptor(
            2 + at, PAGE_NBYTES, min(4096, nbytes - first), 0, (nbytes // 2,), Moment(),
            payload=payload, part=Part(1, first, nbytes),
        )
        for at, first in enumerate(firsts)
    ]  # fmt: skip
    for at in range(0, len(parts), 64):
        assert rank.put(1, Put(parts[at : at + 64]))
    assert rank.put(1, Put([Descriptor(parts[-1].sequence + 1, PAGE_NBYTES, 8, 0, (4,), Moment())]))
    assert rank.wait_idle(20)
    assert rank.session.refused_counts == {DropReason.STORE_ERROR: 1}
    assert rank.session.done.ranges() == [(parts[-1].sequence + 1, parts[-1].sequence + 1)]
    assert pipeline.scratch_nbytes == 0
