"""Tensors larger than the arena: in parts under policy block, through a real daemon, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import capd
from capd_client.config.settings import ClientConfig
from capd_client.inflight.parts import PartCapture, Record
from capd_client.protocol.key import Key, Moment
from capd_client.session.session import Session
from tests.kit import forking
from tests.kit.checking import assert_balanced
from tests.kit.processes import Daemon, at_rest, live_stats, until

ARENA_NBYTES = 1 << 20
MIB = 1 << 20

Connect = Callable[..., Session]


@pytest.fixture
def connect(daemon: Daemon) -> Iterator[Connect]:
    """Makes sessions with a small arena; closes them without waiting."""
    made: list[Session] = []

    def make(**changes: Any) -> Session:
        settings = {"arena_bytes": ARENA_NBYTES, "policy": "block", "strict": True, **changes}
        config = ClientConfig(endpoint=str(daemon.socket), run_id="run", **settings)
        made.append(Session(config, environ={}))
        return made[-1]

    yield make
    for session in made:
        session.close(0.0)


@pytest.fixture
def run(daemon: Daemon) -> Path:
    return daemon.store / "run.zarr"


def key(name: str) -> Key:
    return Key(quant_type="bf16", rank=0, tensor_name=name)


def offer(session: Session, name: str, tensor: torch.Tensor, iteration: int = 0, **options: Any) -> None:
    session.offer(tensor, key(name), Moment(iteration), **options)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def held(run: Path, name: str) -> list[torch.Tensor]:
    """The records of this name, by iteration."""
    found = [
        (record.iteration, series.torch(i))
        for series in capd.open(run).find(tensor_name=name)
        for i, record in enumerate(series.records)
    ]
    return [tensor for _, tensor in sorted(found, key=lambda pair: pair[0])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def scratch_files(daemon: Daemon) -> list[str]:
    """Files without a name that the daemon has open or mapped in its spool."""
    assert daemon.process is not None
    process = Path(f"/proc/{daemon.process.pid}")
    lines = process.joinpath("maps").read_text().splitlines()
    for fd in process.joinpath("fd").iterdir():
        try:
            lines.append(os.readlink(fd))
        except FileNotFoundError:
            continue
    return [line for line in lines if "/spool/" in line and line.endswith("(deleted)")]


def stop_amid(session: Session, daemon: Daemon, captured: threading.Thread, parts: int = 8) -> None:
    """Return with the daemon stopped once some parts of the record that `captured` captures have been cut.

    The thread that cuts them stops it: however late another one looks, the arena holds far less than what is missing.
    """
    cut, left, stopped = session.queue.cut, [parts], threading.Event()

    def counted(record: Record, nbytes: int) -> PartCapture | None:
        left[0] -= 1
        if left[0] == 0:
            daemon.send(signal.SIGSTOP)
            stopped.set()
        return cut(record, nbytes)

    session.queue.cut = counted  # type: ignore[method-assign]
    captured.start()
    assert stopped.wait(60)
    assert captured.is_alive()


def test_every_layout_and_dtype_comes_back_bit_for_bit_beside_small_captures(
    daemon: Daemon, connect: Connect, run: Path
) -> None:
    wide = random(2560, 1024)
    tensors = {
        "contiguous": wide.to(torch.bfloat16),
        "transposed": wide.t(),
        "bool": wide > 0,
        "rows": random(5, 3, 400_000)[:, 1:],
        "expanded": random(1, 700_000).expand(12, -1),
        "flat": random(10 * MIB),
        "zero_dim_rows": random(3, 1, 1, 400_001),
        "nan": torch.full((2 * MIB,), torch.nan).to(torch.float8_e4m3fn),
    }
    session = connect()

    def small(worker: int) -> None:
        for n in range(150):
            offer(session, f"small{worker}", torch.full((17,), float(n)), n)

    workers = [threading.Thread(target=small, args=(worker,)) for worker in range(2)]
    workers.append(threading.Thread(target=offer, args=(session, "other", random(4 * MIB, seed=5), 0)))
    for worker in workers:
        worker.start()
    for name, tensor in tensors.items():
        offer(session, name, tensor)
    offer(session, "cast", wide.t(), cast_to=torch.bfloat16)
    for worker in workers:
        worker.join()
    assert session.flush(60)
    counters = session.snapshot()
    assert session.close(30)
    until(lambda: not scratch_files(daemon))
    stats = live_stats(daemon.endpoint)
    assert daemon.anonymous_nbytes() < 256 * MIB
    daemon.stop()

    assert (counters.offered, counters.committed, counters.in_flight) == (310, 310, 0)
    assert (stats["offered"], stats["committed"], stats["in_flight"], stats["dropped"]) == (310, 310, 0, {})
    tensors |= {"cast": wide.t().to(torch.bfloat16), "other": random(4 * MIB, seed=5)}
    for name, tensor in tensors.items():
        [found] = held(run, name)
        assert found.shape == tensor.shape, name
        assert same_bits(found, tensor), name
    for worker in range(2):
        assert [int(t[0]) for t in held(run, f"small{worker}")] == list(range(150))
    [flat] = capd.open(run).find(tensor_name="flat")
    found = flat.records[0].stats
    assert found.count == tensors["flat"].numel()
    assert found.max == tensors["flat"].max().item()
    assert found.sum == pytest.approx(tensors["flat"].double().sum().item())
    [nan] = capd.open(run).find(tensor_name="nan")
    assert nan.records[0].stats.nan == 2 * MIB


def test_what_a_rank_captures_one_after_the_other_is_numbered_in_that_order(
    connect: Connect, daemon: Daemon, run: Path
) -> None:
    session = connect()
    sizes = [
        700_000,
        100_000,
        400_000,
        5,
        600_000,
        1000,
    ]  # four bytes each; three of them larger than the arena
    for n, size in enumerate(sizes):
        offer(session, "x", torch.full((size,), float(n)), n)
    assert session.flush(60)
    session.close(30)
    daemon.stop()

    series = capd.open(run).find(tensor_name="x")
    for one in series:  # a record beyond the extents of the first opens a variant
        iterations = [record.iteration for record in one.records]
        assert iterations == sorted(iterations)
    assert [tensor.numel() for tensor in held(run, "x")] == sizes


def test_under_policy_drop_the_message_names_what_is_needed(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    session = connect(policy="drop")
    for nbytes in (5 * MIB + 1, ARENA_NBYTES):  # as large as the arena is not smaller than its slots
        offer(session, "x", torch.zeros(nbytes, dtype=torch.uint8))
    assert session.snapshot().dropped == {"too_large": 2}
    assert f"CAPD_ARENA_BYTES={5 * MIB + 2 * 4096} or more" in caplog.text
    assert "CAPD_POLICY=block" in caplog.text

    enough = connect(policy="drop", arena_bytes=5 * MIB + 2 * 4096)
    offer(enough, "x", torch.zeros(5 * MIB + 1, dtype=torch.uint8))
    assert enough.flush(30)
    assert enough.snapshot().committed == 1


def test_a_daemon_killed_amid_the_parts_costs_that_record_and_says_so(
    daemon: Daemon, connect: Connect, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = connect(ping_s=0.3)
    offer(session, "x", random(6 * MIB, seed=1), 0)
    capture = threading.Thread(target=offer, args=(session, "x", random(6 * MIB, seed=2), 1))
    stop_amid(session, daemon, capture)
    daemon.kill()
    daemon.start()
    capture.join(60)
    offer(session, "x", random(6 * MIB, seed=3), 2)
    assert session.flush(60)
    now = session.snapshot()
    session.close(30)
    stats = until(lambda: _at_rest(daemon))
    daemon.stop()

    assert (now.offered, now.committed, now.dropped) == (3, 2, {"parts_lost": 1})
    assert (stats["offered"], stats["committed"], stats["dropped"]) == (3, 2, {"parts_lost": 1})
    assert "the daemon that had them is gone" in caplog.text
    first, last = held(run, "x")
    assert same_bits(first, random(6 * MIB, seed=1))
    assert same_bits(last, random(6 * MIB, seed=3))


def _at_rest(daemon: Daemon) -> dict[str, Any] | None:
    stats = live_stats(daemon.endpoint)
    return stats if all(map(at_rest, stats["sessions"])) else None


def test_a_lost_connection_resumes_where_it_was(daemon: Daemon, connect: Connect, run: Path) -> None:
    session = connect(ping_s=0.1)
    capture = threading.Thread(target=offer, args=(session, "x", random(6 * MIB)))
    stop_amid(session, daemon, capture)
    before = session.transport._connections
    until(lambda: session.transport._connections > before)  # three pings went unanswered
    daemon.send(signal.SIGCONT)
    capture.join(60)
    assert session.flush(60)
    assert session.snapshot().committed == 1
    session.close(30)
    daemon.stop()
    [found] = held(run, "x")
    assert same_bits(found, random(6 * MIB))


def test_a_stopped_daemon_costs_one_wait_and_one_drop(
    daemon: Daemon, connect: Connect, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = connect(max_block_ms=700.0)
    offer(session, "x", torch.ones(1))
    assert session.flush(30)
    daemon.send(signal.SIGSTOP)
    started = time.monotonic()
    offer(session, "x", random(6 * MIB))
    offer(session, "x", random(6 * MIB))  # does not wait again
    assert time.monotonic() - started < 20
    now = session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (3, 0, {"arena_full": 2})
    assert "CAPD_MAX_BLOCK_MS" in caplog.text

    daemon.send(signal.SIGCONT)
    until(lambda: not session.queue.busy)
    offer(session, "y", torch.zeros(200_000))  # nearly all of the arena: every slot came back
    assert session.flush(30)
    until(lambda: not scratch_files(daemon))
    session.close(30)
    stats = until(lambda: _at_rest(daemon))
    assert (stats["offered"], stats["committed"], stats["dropped"]) == (4, 2, {"arena_full": 2})


JOB = """
import os, signal, sys
import torch, capd_client
from capd_client.session import current

capd_client.capture(torch.ones(3), tensor_name="first")
assert capd_client.flush(30)
queue = current._session.queue
cut = queue.cut

def counted(record, nbytes):
    if queue.last_sequence == 12:
        os.kill(int(sys.argv[1]), signal.SIGSTOP)  # by the thread that cuts the parts: never behind the last of them
        print("amid", flush=True)
    return cut(record, nbytes)

queue.cut = counted
capd_client.capture(torch.zeros(8 << 20), tensor_name="large")
"""


def test_a_rank_killed_amid_the_parts_is_counted_once_and_nothing_is_left(daemon: Daemon, run: Path) -> None:
    environment = {
        **os.environ,
        "CAPD_ENDPOINT": daemon.endpoint,
        "CAPD_RUN_ID": "run",
        "CAPD_POLICY": "block",
        "CAPD_ARENA_BYTES": str(ARENA_NBYTES),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    assert daemon.process is not None
    job = forking.popen(
        [sys.executable, "-c", JOB, str(daemon.process.pid)], env=environment, stdout=subprocess.PIPE
    )
    with job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"amid\n"
        job.kill()
    daemon.send(signal.SIGCONT)

    stats = until(lambda: _at_rest(daemon))
    assert_balanced(stats)
    assert (stats["offered"], stats["committed"], stats["dropped"]) == (2, 1, {"rank_died": 1})
    until(lambda: not scratch_files(daemon))
    daemon.stop()
    assert [len(series.records) for series in capd.open(run).series] == [1]


@pytest.fixture
def small_disk(tmp_path: Path, runtime_dir: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "store", runtime_dir, "--max-disk", "20MB").start()
    yield daemon
    daemon.discard()


def test_a_record_and_its_file_must_both_fit_on_the_disk(small_disk: Daemon) -> None:
    config = ClientConfig(
        endpoint=str(small_disk.socket), run_id="run", policy="block", arena_bytes=ARENA_NBYTES, strict=True
    )
    session = Session(config, environ={})
    try:
        offer(session, "x", random(3 * MIB))  # 12 MiB, twice
        offer(session, "x", random(1 * MIB))
        assert session.flush(60)
        now = session.snapshot()
        assert (now.offered, now.committed, now.dropped) == (2, 1, {"disk_full": 1})
        assert not session.queue.busy
    finally:
        session.close(30)
    stats = until(lambda: _at_rest(small_disk))
    assert (stats["offered"], stats["committed"], stats["dropped"]) == (2, 1, {"disk_full": 1})
    until(lambda: not scratch_files(small_disk))
