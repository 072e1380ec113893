"""Lanes give every client its share of bytes, whatever the size of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from capd.server.pipeline.jobs import PAUSE_NBYTES, PAUSE_TASKS, TURN_NBYTES, Lanes, RecordJob, Task, Tickets
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor

DEFINE = Define(id=0, key=Key(quant_type="q", rank=0, tensor_name="x"), dtype="uint8")
LARGE, SMALL = 16 << 20, 4 << 10


def put(lanes: Lanes, client: bytes, nbytes: int = SMALL, count: int = 1) -> None:
    for _ in range(count):
        descriptor = Descriptor(1, 4096, nbytes, 0, (nbytes,), Moment())
        lanes.put([Task(RecordJob("run", client, 1, DEFINE, descriptor, memoryview(b""), None), 0)])  # type: ignore[arg-type]


def take(lanes: Lanes, count: int) -> list[bytes]:
    """The clients of the next tasks, taken as the dispatch thread does it."""
    taken: list[bytes] = []
    while len(taken) < count:
        taken += [task.job.client for task in lanes.get(min(64, count - len(taken)))]
    return taken


def test_clients_with_records_alike_take_turns() -> None:
    lanes = Lanes()
    for client in (b"a", b"b", b"c"):
        put(lanes, client, SMALL, 1000)
    counts = Counter(take(lanes, 1500))
    assert max(counts.values()) - min(counts.values()) <= TURN_NBYTES // SMALL


@pytest.mark.parametrize("first", [b"large", b"small"])
def test_small_records_do_not_wait_for_as_many_large_ones(first: bytes) -> None:
    lanes = Lanes()
    for client in (first, b"large", b"small"):
        if client == b"large":
            put(lanes, b"large", LARGE, 4)
        else:
            put(lanes, b"small", SMALL, 500)
    taken = take(lanes, 502)
    assert taken.count(b"large") <= 2
    assert set(take(lanes, 2)) <= {b"large", b"small"}  # they are not forgotten either


def test_large_records_that_come_one_at_a_time_pay_for_what_they_took() -> None:
    lanes = Lanes()
    put(lanes, b"small", SMALL, 10_000)
    put(lanes, b"large", LARGE)
    taken: Counter[bytes] = Counter()
    while taken[b"small"] < 5_000:
        [client] = take(lanes, 1)
        taken[client] += 1
        if client == b"large":  # its queue was empty
            put(lanes, b"large", LARGE)
    assert taken[b"large"] <= 1 + 5_000 * (SMALL + (16 << 10)) // LARGE + 1


def test_a_client_that_left_is_forgotten_when_it_owes_nothing_any_more() -> None:
    lanes = Lanes()
    put(lanes, b"gone", LARGE)
    take(lanes, 1)
    put(lanes, b"alone", SMALL, 2000)
    assert take(lanes, 2000) == [b"alone"] * 2000
    assert list(lanes._lanes) == [b"alone"]


def test_one_clients_order_is_kept_and_nothing_is_lost() -> None:
    lanes = Lanes()
    sizes = [LARGE, 0, SMALL, LARGE * 100, SMALL, 0]
    for nbytes in sizes:
        put(lanes, b"a", nbytes)
        put(lanes, b"b", nbytes)
    tasks: list[Task] = []
    while len(tasks) < 2 * len(sizes):
        tasks += lanes.get(4)
    for client in (b"a", b"b"):
        assert [task.job.descriptor.nbytes for task in tasks if task.job.client == client] == sizes
    lanes.close()
    assert lanes.get(1) == []


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Lanes, Future[list[Task]]]]:
    """Lanes that one round was taken from, and the next round, which waits until something presses."""
    monkeypatch.setattr("capd.server.pipeline.jobs.PAUSE_S", 3600.0)
    lanes = Lanes()
    put(lanes, b"first")
    assert len(lanes.get(64)) == 1
    with ThreadPoolExecutor(1) as pool:
        try:
            yield lanes, pool.submit(lanes.get)
        finally:
            lanes.close()


def test_little_of_many_ranks_waits_for_more_and_goes_on_together(
    paused: tuple[Lanes, Future[list[Task]]],
) -> None:
    lanes, round_ = paused
    for rank in range(PAUSE_TASKS - 1):
        put(lanes, rank.to_bytes(2), nbytes=16)
    assert not round_.done()
    put(lanes, b"last", nbytes=16)
    assert len(round_.result(20)) == PAUSE_TASKS


def test_many_bytes_do_not_wait(paused: tuple[Lanes, Future[list[Task]]]) -> None:
    lanes, round_ = paused
    put(lanes, b"little")
    put(lanes, b"much", nbytes=PAUSE_NBYTES)
    assert len(round_.result(20)) == 2


def test_what_comes_waits_for_one_round_of_large_records_and_no_longer() -> None:
    lanes = Lanes()
    put(lanes, b"large", LARGE, 4)
    assert len(lanes.get()) == 1
    put(lanes, b"small", SMALL)
    assert b"small" in take(lanes, 2)


def test_who_waits_for_an_outcome_ends_the_pause_of_what_is_queued_and_of_no_more(
    paused: tuple[Lanes, Future[list[Task]]],
) -> None:
    lanes, round_ = paused
    put(lanes, b"flushed")
    lanes.hurry()
    assert len(round_.result(20)) == 1
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(lanes.get, 64)
        put(lanes, b"later")
        assert not again.done()
        lanes.close()
        assert len(again.result(20)) == 1


def test_the_oldest_open_job_is_known_however_jobs_end() -> None:
    tickets = Tickets()
    assert tickets.oldest_since is None
    first, second = tickets.issue(2, 10.0), tickets.issue(1, 20.0)
    assert tickets.issue(0, 25.0) == second + 1

    seen = []
    for done in (second, first, first + 1):
        seen.append(tickets.oldest_since)
        tickets.done([done])
    assert seen == [10.0, 10.0, 10.0]
    assert tickets.oldest_since is None
    third = tickets.issue(1, 30.0)
    assert tickets.oldest_since == 30.0
    tickets.issue(1, 40.0)
    tickets.done([third])
    assert tickets.oldest_since == 40.0
