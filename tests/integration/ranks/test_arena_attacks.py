"""A rank that turns on its own arena, or passes something else for one: the daemon and the other ranks go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import capd
from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import ARENA_BYTE, MAX_BATCH, Define, Descriptor, Put, Reject
from tests.kit.daemon import (
    ARENA_NBYTES,
    FUTURE_WRITE,
    SEALS,
    DaemonProcess,
    Rank,
    make_memfd,
    open_socket,
    receive,
)
from tests.kit.processes import capd as command

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
MADV_REMOVE = 9
NBYTES = 512 << 10  # beyond the small records: encoded straight from the arena
ROUNDS = 12

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """One for all attacks: each must leave it whole."""
    with tempfile.TemporaryDirectory(prefix="capd-a-", dir="/tmp") as directory:
        started = DaemonProcess(Path(directory) / "store", Path(directory) / "s.sock")
        yield started
        assert started.stop() == 0, started.text()
        assert "Traceback" not in started.text()


@pytest.fixture
def rank(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Rank]:
    """A rank of a run of its own."""
    made = Rank(daemon.path, run_id=f"run-{abs(hash(request.node.name))}")
    yield made
    made.close()


def punch(fd: int, offset: int, nbytes: int) -> int:
    """Try to take the pages away: whoever reads there would get zeros, and pay for them. Returns the error."""
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    return 0 if libc.fallocate(fd, mode, offset, nbytes) == 0 else ctypes.get_errno()


def test_no_rank_changes_the_size_of_memory_that_the_daemon_reads(daemon: DaemonProcess, rank: Rank) -> None:
    rank.connect()
    for nbytes in (0, PAGE_NBYTES, ARENA_NBYTES - 1, ARENA_NBYTES + 1, ARENA_NBYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(rank.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(rank.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    rank.put(1)
    rank.expect_acks(1)


def test_no_rank_takes_pages_away_that_the_daemon_reads(daemon: DaemonProcess, rank: Rank) -> None:
    """Without that seal it is no arena."""
    fd = make_memfd(seals=SEALS & ~FUTURE_WRITE)
    answer = rank.open(fds=[fd])
    os.close(fd)
    assert isinstance(answer, Reject)
    assert (answer.code, answer.retry) == ("arena", False)
    assert "FUTURE_WRITE" in answer.message

    rank.connect()
    rank.put(1)
    rank.expect_acks(1)
    for offset in (0, PAGE_NBYTES):
        assert punch(rank.fd, offset, PAGE_NBYTES) == errno.EPERM
        with pytest.raises(OSError, match="not permitted"):
            rank.memory.madvise(MADV_REMOVE, offset, PAGE_NBYTES)
    rank.put(2)
    rank.expect_acks(2)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_writes_under_the_daemons_reading_cost_the_attackers_own_values_alone(
    dtype: str, daemon: DaemonProcess, rank: Rank
) -> None:
    """Pages change while they are encoded: what is kept is what was read, checksums right."""
    rank.connect()
    rank.send(Define(id=1, key=Key(quant_type="q", rank=0, tensor_name="x"), dtype=dtype))
    over = threading.Event()
    rank.memory[PAGE_NBYTES : PAGE_NBYTES + NBYTES] = bytes(NBYTES)

    def attack() -> None:
        at = 0
        while not over.is_set():
            at = (at + 7 * PAGE_NBYTES) % NBYTES
            rank.memory[PAGE_NBYTES + at : 2 * PAGE_NBYTES + at] = os.urandom(PAGE_NBYTES)

    attacker = threading.Thread(target=attack)
    attacker.start()
    shape = (NBYTES // (1 if dtype == "uint8" else 2),)
    try:
        for sequence in range(1, ROUNDS + 1):
            rank.send(Put([Descriptor(sequence, PAGE_NBYTES, NBYTES, 1, shape, Moment(iteration=sequence))]))
            rank.expect_acks(sequence)
    finally:
        over.set()
        attacker.join()
    rank.count(offered=ROUNDS)
    rank.bye()
    assert daemon.control("seal", rank.run_id).ok

    run = daemon.store / f"{rank.run_id}.zarr"
    verified = json.loads(command("verify", str(run), "--json").stdout)
    assert verified["ok"], verified
    [series] = capd.open(run).series
    assert [record.iteration for record in series.records] == [*range(1, ROUNDS + 1)]
    for number in range(ROUNDS):
        assert series.numpy(number).nbytes == NBYTES  # decodes, and every checksum holds


def resident_nbytes(daemon: DaemonProcess) -> int:
    """VmRSS of the daemon: what it reads of an arena counts, too."""
    for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS in /proc status")


@pytest.mark.parametrize("kept", ["payload", "statistics", "row beside a payload"])
def test_a_hole_that_a_rank_describes_is_a_counted_refusal_and_costs_no_memory(
    kept: str, daemon: DaemonProcess, request: pytest.FixtureRequest
) -> None:
    """A read of it through the mapping would make its pages, on the daemon's account."""
    nbytes = 1 << 30
    hostile = Rank(daemon.path, run_id=f"run-{abs(hash(request.node.name))}", arena_nbytes=nbytes + (1 << 20))
    try:
        hostile.connect()
        hostile.put(1)
        hostile.expect_acks(1)
        before, pages = resident_nbytes(daemon), os.fstat(hostile.fd).st_blocks
        hole = 2 * PAGE_NBYTES
        if kept == "payload":
            items = [
                Descriptor(2, hole, nbytes, 0, (nbytes // 2,), Moment()),
                Descriptor(3, PAGE_NBYTES, nbytes, 0, (nbytes // 2,), Moment()),  # its first page is there
            ]
        elif kept == "statistics":
            items = [Descriptor(n, hole, nbytes, 0, (nbytes // 2,), Moment(), payload=False) for n in (2, 3)]
        else:
            items = [
                Descriptor(n, PAGE_NBYTES, 8, 0, (4,), Moment(), row_offset=hole + n * (64 << 10))
                for n in range(2, 10_000)
            ]
        for at in range(0, len(items), MAX_BATCH):
            hostile.send(Put(items[at : at + MAX_BATCH]))
        hostile.listen_until(lambda: len(hostile.nacked) == len(items), "a refusal of each")
        assert {reason for reason, _ in hostile.nacked.values()} == {DropReason.BAD_DESCRIPTOR}
        assert all("never written" in text or "ever written" in text for _, text in hostile.nacked.values())
        hostile.put(20_000, slot=1)
        hostile.expect_acks(20_000)

        assert os.fstat(hostile.fd).st_blocks == pages
        assert resident_nbytes(daemon) - before < 16 << 20
        [session] = daemon.run_stats(str(hostile.run_id))["sessions"]
        assert session["dropped"] == {"bad_descriptor": len(items)}
        hostile.bye()
    finally:
        hostile.close()


def test_an_arena_without_a_counter_page_is_none(daemon: DaemonProcess, rank: Rank) -> None:
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, ARENA_NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    answer = rank.open(fds=[fd])
    assert isinstance(answer, Reject)
    assert answer.code == "arena"
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


@contextlib.contextmanager
def _other(kind: str, directory: Path) -> Iterator[int]:
    """A descriptor of something that is no sealed memfd."""
    with contextlib.ExitStack() as stack:
        if kind == "pipe":
            fds = os.pipe()
        elif kind == "socket":
            one, other = socket.socketpair()
            fds = (one.detach(), other.detach())
        elif kind == "tmpfs file":
            path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="capd-test-")) / "arena"
            stack.callback(path.parent.rmdir)
            stack.callback(path.unlink)
            path.write_bytes(bytes(ARENA_NBYTES))
            fds = (os.open(path, os.O_RDWR),)
        elif kind == "memory of the rank":
            fds = (os.open("/proc/self/mem", os.O_RDWR),)
        elif kind == "path only":
            memfd = make_memfd()
            stack.callback(os.close, memfd)
            fds = (os.open(f"/proc/self/fd/{memfd}", os.O_PATH),)
        elif kind == "directory":
            fds = (os.open(directory, os.O_RDONLY),)
        elif kind == "event":
            fds = (os.eventfd(0),)
        elif kind == "write only":
            memfd = make_memfd()
            stack.callback(os.close, memfd)
            fds = (os.open(f"/proc/self/fd/{memfd}", os.O_WRONLY),)
        else:  # cannot be sealed
            fds = (os.memfd_create("arena"),)
            os.ftruncate(fds[0], ARENA_NBYTES)
        for fd in fds:
            stack.callback(os.close, fd)
        yield fds[0]


@pytest.mark.parametrize(
    "kind",
    [
        "pipe", "socket", "tmpfs file", "memory of the rank", "path only", "directory", "event", "write only",
        "memfd without seals",
    ],
)  # fmt: skip
def test_another_descriptor_is_no_arena(kind: str, daemon: DaemonProcess, rank: Rank, tmp_path: Path) -> None:
    with _other(kind, tmp_path) as fd:
        answer = rank.open(fds=[fd])
    assert isinstance(answer, Reject)
    assert answer.code == "arena"

    rank.connect()  # the same rank with its own memory
    rank.put(1)
    rank.expect_acks(1)


def test_memory_in_huge_pages_is_no_arena(daemon: DaemonProcess, rank: Rank) -> None:
    """Where the rank punches a hole, the daemon's read would take a page from a pool that may be empty: SIGBUS."""
    nbytes = 2 << 20
    try:
        fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        answer = rank.open(fds=[fd], arena_nbytes=nbytes)
    finally:
        os.close(fd)
    assert isinstance(answer, Reject)
    assert (answer.code, answer.retry) == ("arena", False)
    assert f"pages of {nbytes} bytes" in answer.message


def test_the_own_end_of_the_connection_is_no_arena(daemon: DaemonProcess, rank: Rank) -> None:
    """A socket that is passed over itself refers to itself."""
    sock = open_socket(daemon.path)
    socket.send_fds(sock, [ARENA_BYTE], [sock.fileno()])
    rank.connection = Connection(sock.detach())
    rank.send(rank.hello())
    answer = receive(rank.connection)
    assert isinstance(answer, Reject)
    assert answer.code == "arena"
