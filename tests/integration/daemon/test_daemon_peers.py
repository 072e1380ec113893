"""Hostile, broken and unlucky peers: each costs itself, never another rank, never the daemon."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import resource
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from capd_client.protocol.control import Control, ControlReply, Steer
from capd_client.protocol.counter_page import COUNTER_STEPS, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    ARENA_BYTE,
    HANDSHAKE_TIMEOUT_S,
    MAX_FRAME_NBYTES,
    Define,
    Descriptor,
    Flush,
    Flushed,
    Hello,
    Ping,
    Pong,
    Put,
    Reject,
    Welcome,
    encode,
)
from tests.kit.daemon import (
    ARENA_NBYTES,
    DEFINE,
    PATIENCE_S,
    DaemonProcess,
    Rank,
    make_memfd,
    open_socket,
    payload,
    receive,
    tool,
    wait_for,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="capd-p-", dir="/tmp") as directory:
        started = DaemonProcess(Path(directory) / "store", Path(directory) / "s.sock")
        yield started
        assert started.stop() == 0, started.text()
        assert "Traceback" not in started.text()


@pytest.fixture
def rank(daemon: DaemonProcess) -> Iterator[Rank]:
    made = Rank(daemon.path)
    yield made
    made.close()


@pytest.fixture
def witness(daemon: DaemonProcess) -> Iterator[Rank]:
    """An honest rank that must be served all the while; checked again when the test is over."""
    made = Rank(daemon.path, rank=1, run_id="honest")
    made.connect()
    made.put(1)
    made.expect_acks(1)
    yield made
    made.put(2)
    made.expect_acks(2)
    made.bye()
    made.close()


def rejected(answer: object, code: str) -> Reject:
    assert isinstance(answer, Reject), answer
    assert answer.code == code
    return answer


def raw_rank(path: Path) -> socket.socket:
    sock, fd = open_socket(path), make_memfd()
    socket.send_fds(sock, [ARENA_BYTE], [fd])
    os.close(fd)
    return sock


def answer_of(fd: int) -> object:
    """The daemon's last frame before it closes the connection; closes `fd`."""
    connection = Connection(fd)
    try:
        message = receive(connection)
        with pytest.raises((EOFError, ConnectionResetError)):
            receive(connection)
        return message
    finally:
        connection.close()


@pytest.mark.usefixtures("witness")
@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!i", MAX_FRAME_NBYTES + 1),
        struct.pack("!iQ", -1, 2**63),
        struct.pack("!i", -2),
        struct.pack("!i", 4) + b"\xff\xff\xff\xff",
        struct.pack("!i", 0),
        b"\x00\x00\x00\x20" + pickle.dumps(os.getcwd)[:32].ljust(32, b"."),
        struct.pack("!i", len(encode(Ping()))) + encode(Ping()),
        struct.pack("!i", 7) + b"\x81\xa4type\xa5",
    ],
    ids=["oversize", "huge", "negative", "garbage", "empty", "pickle", "not-hello", "torn"],
)
def test_a_frame_outside_the_protocol_ends_that_connection_with_a_reason(
    daemon: DaemonProcess, frame: bytes
) -> None:
    sock = raw_rank(daemon.path)
    sock.sendall(frame)

    rejected(answer_of(sock.detach()), "malformed")


@pytest.mark.usefixtures("witness")
def test_malformed_frames_after_the_handshake_end_the_connection_too(
    daemon: DaemonProcess, rank: Rank
) -> None:
    rank.connect()
    assert rank.connection is not None
    rank.connection.send_bytes(b"\xc1")

    rejected(rank.expect(Reject), "malformed")
    rank.connect()  # the session survives
    rank.put(1)
    rank.expect_acks(1)


def trickle(sock: socket.socket, over: threading.Event) -> None:
    """A HELLO that never ends, a byte at a time."""
    hello = encode(Hello(protocol=2, client=b"s" * 16, connection=1, rank=0, arena_nbytes=ARENA_NBYTES))
    for byte in itertools.chain(struct.pack("!i", 1000), itertools.cycle(hello)):
        if over.wait(0.1):
            return
        with contextlib.suppress(OSError):
            sock.sendall(bytes([byte]))


@pytest.mark.usefixtures("witness")
def test_peers_without_hello_are_sent_away_in_time_however_they_stall(daemon: DaemonProcess) -> None:
    began = time.monotonic()
    silent = open_socket(daemon.path)
    halfway = raw_rank(daemon.path)
    slow = raw_rank(daemon.path)
    over = threading.Event()
    thread = threading.Thread(target=trickle, args=(slow, over))
    thread.start()

    for sock in (silent, halfway, slow):
        assert select.select([sock], [], [], HANDSHAKE_TIMEOUT_S + PATIENCE_S)[0]
        assert "no HELLO" in rejected(answer_of(os.dup(sock.fileno())), "malformed").message

    assert time.monotonic() - began >= HANDSHAKE_TIMEOUT_S
    over.set()
    thread.join()
    for sock in (silent, halfway, slow):
        sock.close()


@pytest.mark.parametrize(
    ("fd", "says"),
    [
        (lambda: make_memfd(seals=0), "not sealed"),
        (lambda: make_memfd(nbytes=ARENA_NBYTES // 2), "announced"),
        (lambda: os.open(__file__, os.O_RDONLY), "announced"),
        (lambda: os.open("/dev/null", os.O_RDWR), "not a memfd"),
    ],
    ids=["unsealed", "wrong size", "a file", "a device"],
)
def test_an_unsafe_arena_is_refused(daemon: DaemonProcess, rank: Rank, fd: object, says: str) -> None:
    bad = fd()  # type: ignore[operator]
    answer = rank.open(fds=[bad])
    os.close(bad)

    assert says in rejected(answer, "arena").message


def test_an_ordinary_file_of_the_right_size_is_refused(rank: Rank, tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(bytes(ARENA_NBYTES))
    with path.open("r+b") as file:
        rejected(rank.open(fds=[file.fileno()]), "arena")


def descriptors(daemon: DaemonProcess) -> list[int]:
    return [int(number) for number in os.listdir(f"/proc/{daemon.process.pid}/fd")]


def limit_for_one_more_file(daemon: DaemonProcess) -> int:
    """Once nobody but the witness is connected."""
    wait_for(
        lambda: sum(name.startswith("socket:") for name in daemon.open_links()) == 2,
        "the listening one and the witness's",
    )
    used = set(descriptors(daemon))
    for _ in range(10):  # without what a look at the store's files has open for a moment
        time.sleep(0.01)
        used &= set(descriptors(daemon))
    return [number for number in range(len(used) + 2) if number not in used][1]


def mapped_nbytes(daemon: DaemonProcess) -> int:
    statm = Path(f"/proc/{daemon.process.pid}/statm").read_text()
    return int(statm.split()[0]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("what", "left", "says"),
    [
        (resource.RLIMIT_NOFILE, limit_for_one_more_file, "descriptor"),
        (resource.RLIMIT_AS, lambda daemon: mapped_nbytes(daemon) + (64 << 20), "memory"),
    ],
    ids=["descriptors", "memory"],
)
@pytest.mark.usefixtures("witness")
def test_a_rank_that_finds_the_daemon_short_of_something_may_come_back(
    what: int, left: Callable[[DaemonProcess], int], says: str, daemon: DaemonProcess, rank: Rank
) -> None:
    nbytes = 1 << 30  # more than is left of the memory
    arena = make_memfd(nbytes)
    before = resource.prlimit(daemon.process.pid, what)
    try:
        resource.prlimit(daemon.process.pid, what, (left(daemon), before[1]))
        answer = rank.open(fds=[arena], arena_nbytes=nbytes)
        assert isinstance(answer, Reject)
        assert says in answer.message
        assert answer.retry, answer
    finally:
        resource.prlimit(daemon.process.pid, what, before)
        rank.disconnect()

    assert isinstance(rank.open(fds=[arena], arena_nbytes=nbytes), Welcome)
    os.close(arena)


@pytest.mark.parametrize("count", [0, 2, 6])
def test_a_wrong_number_of_descriptors_is_refused_and_none_is_kept(
    daemon: DaemonProcess, rank: Rank, count: int
) -> None:
    wait_for(lambda: daemon.stats()["connections"] == 1, "only the asking tool is connected")
    before = len(descriptors(daemon))

    rejected(rank.open(fds=[rank.fd] * count), "malformed")
    rank.disconnect()

    wait_for(lambda: len(descriptors(daemon)) <= before, "descriptors closed again")


def test_an_unknown_first_byte_is_refused(daemon: DaemonProcess) -> None:
    sock = open_socket(daemon.path)
    sock.sendall(b"Q")
    rejected(answer_of(sock.detach()), "malformed")


def test_other_versions_and_hostile_run_names_are_refused(daemon: DaemonProcess, rank: Rank) -> None:
    assert "protocol 99" in rejected(rank.open(protocol=99), "version").message
    for run_id in ("", "../up", "a/b", ".hidden", "line\nbreak", "x" * 129):
        rejected(rank.open(run_id=run_id), "run")
    assert not (daemon.store.parent / "up.zarr").exists()


def test_bad_descriptors_are_refused_one_by_one(rank: Rank) -> None:
    rank.connect()
    rank.memory[4096:4104] = payload(5)
    good = Descriptor(5, 4096, 8, 0, (4,), Moment())
    bad = [
        Descriptor(1, 0, 8, 0, (4,), Moment()),
        Descriptor(2, ARENA_NBYTES - 4, 8, 0, (4,), Moment()),
        Descriptor(3, 4096, 8, 0, (5,), Moment()),
        Descriptor(4, 4096, 8, 77, (4,), Moment()),
        Descriptor(6, 4096, 8, 1, (4,), Moment()),
        Descriptor(7, 4096, 8, 0, (4,), Moment(), metadata=b"no json"),
        Descriptor(8, 0, 0, 0, (0, 2**31, 2**31), Moment()),
        Descriptor(9, 4096, 8, 2, (4,), Moment()),
        Descriptor(10, 4096, 8, 3, (4,), Moment()),
    ]
    rank.send(Define(id=1, key=DEFINE.key, dtype="complex64"))
    rank.send(Define(id=2, key=DEFINE.key, dtype="bfloat16", attributes={"raw": b"1"}))
    rank.send(Define(id=3, key=DEFINE.key, dtype="bfloat16", attributes={"scale": float("nan")}))

    rank.send(Put(sorted([good, *bad], key=lambda item: item.sequence)))

    rank.expect_acks(5)
    rank.listen_until(lambda: len(rank.nacked) == len(bad), "all NACKs")
    assert {reason for reason, _ in rank.nacked.values()} == {DropReason.BAD_DESCRIPTOR}


@pytest.mark.parametrize("violation", ["descending", "redefined", "second hello", "tool message", "drop row"])
def test_violations_after_hello_end_the_connection(rank: Rank, violation: str) -> None:
    from capd_client.protocol.control import Stats
    from capd_client.protocol.messages import DropRow, Drops

    messages = {
        "descending": Put(
            [Descriptor(5, 4096, 8, 0, (4,), Moment()), Descriptor(5, 4096, 8, 0, (4,), Moment())]
        ),
        "redefined": Define(id=0, key=DEFINE.key, dtype="float32"),
        "second hello": rank.hello(),
        "tool message": Stats(),
        "drop row": Drops([DropRow(9, 0, 1, 1, 0, 0)]),
    }
    rank.connect()
    rank.send(messages[violation])
    rejected(rank.expect(Reject), "malformed")


def test_hostile_names_reach_the_store_as_data_only(daemon: DaemonProcess) -> None:
    names = [
        "../../../tmp/escape",
        "a\nb",
        "n" * 4096,
        "zarr.json",
        "Case",
        "case",
        "é",
        "e\u0301",
        "c",
        ".capd",
        "",
    ]
    rank = Rank(daemon.path, run_id="hostile")
    rank.connect()
    for number, name in enumerate(names, start=1):
        rank.send(Define(id=number, key=Key(quant_type="bf16", rank=0, tensor_name=name), dtype="bfloat16"))
        rank.put(number, key_id=number)
    rank.expect_acks(*range(1, len(names) + 1))
    rank.bye()
    rank.close()

    assert daemon.control("seal", "hostile").ok
    run = daemon.store / "hostile.zarr"
    assert len(list(run.glob("*/*/*/*/*/data"))) == len(names)
    assert not (daemon.store.parent / "tmp").exists()


def test_a_tool_gets_answers_and_strangers_among_its_messages_end_it(daemon: DaemonProcess) -> None:
    with tool(daemon.path) as connection:
        for _ in range(3):
            connection.send_bytes(encode(Ping()))
            assert receive(connection) == Pong()
        connection.send_bytes(encode(DEFINE))
        rejected(receive(connection), "malformed")
    with tool(daemon.path) as connection:
        connection.send_bytes(encode(Control("explode")))
        rejected(receive(connection), "malformed")
    assert not daemon.control("seal", "no such run").ok


def test_a_peer_that_never_reads_its_answers_is_disconnected_alone(
    daemon: DaemonProcess, witness: Rank
) -> None:
    rank = Rank(daemon.path, run_id="deaf")
    rank.connect()

    def ask_until_disconnected() -> None:
        while True:
            rank.send(Ping())

    with pytest.raises(OSError):
        ask_until_disconnected()
    witness.put(3)
    witness.expect_acks(3)
    rank.close()


def test_flush_and_ping_are_answered(rank: Rank) -> None:
    rank.connect()
    rank.put(*range(1, 65))
    rank.send(Flush(7, 64))
    rank.send(Ping())

    assert rank.expect(Flushed) == Flushed(7)
    assert rank.expect(Pong) == Pong()
    assert rank.acked >= set(range(1, 65))


def test_refusals_are_counted(daemon: DaemonProcess) -> None:
    sock = open_socket(daemon.path)
    sock.sendall(b"?")
    answer_of(sock.detach())

    wait_for(lambda: daemon.stats()["refused_connections"].get("malformed", 0) >= 1, "the refusal is counted")


def test_a_rank_that_counts_nonsense_puts_off_no_order_for_the_others(daemon: DaemonProcess) -> None:
    ranks = [Rank(daemon.path, rank=number, run_id="counts") for number in range(3)]
    try:
        for rank, begun in zip(ranks, (8, 7, 2**60), strict=True):  # a count that grew would have a pace
            rank.memory[8 * COUNTER_STEPS : 8 * COUNTER_STEPS + 8] = struct.pack("Q", begun)
            rank.connect()

        reply = daemon.control("stop", "counts")
        assert isinstance(reply, ControlReply)
        assert reply.message == "ordered from iteration 8 on"
        for rank in ranks:
            steer = rank.expect(Steer)
            assert isinstance(steer, Steer)
            assert (steer.from_iteration, steer.capturing) == (8, False)
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_sent_away_by_name_unless_allowed() -> None:
    stranger, friend = 65534, 65533
    with tempfile.TemporaryDirectory(prefix="capd-u-", dir="/tmp") as directory:
        os.chmod(directory, 0o711)  # noqa: S103 - other users must reach the socket
        daemon = DaemonProcess(
            Path(directory) / "store", Path(directory) / "s.sock", "--allow-uid", str(friend)
        )
        rank = Rank(daemon.path)
        try:
            message = rejected(_as_user(stranger, rank.open), "peer").message
            assert f"uid {stranger}" in message
            assert f"uid 0, {friend}" in message
            assert f"--allow-uid {stranger}" in message

            assert isinstance(_as_user(friend, rank.open), Welcome)
        finally:
            rank.close()
            daemon.stop()


def _as_user(uid: int, act: Callable[[], object]) -> object:
    os.seteuid(uid)
    try:
        return act()
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_without_allow_uid_the_kernel_refuses_other_users(daemon: DaemonProcess) -> None:
    with pytest.raises(PermissionError):
        _as_user(65534, lambda: open_socket(daemon.path))
