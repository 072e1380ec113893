"""A real `capd serve` process and hand-driven peers: ranks that speak the protocol exactly as told."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import signal
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from capd.store.keeps.held_files import discard_held
from capd_client.protocol.control import Control, ControlReply, Stats, StatsReply
from capd_client.protocol.counter_page import COUNTER_MAGIC, DROP_REASONS, PAGE_NBYTES, DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    ARENA_BYTE,
    MAX_FRAME_NBYTES,
    TOOL_BYTE,
    Ack,
    Bye,
    ByeOk,
    ClientMessage,
    DaemonMessage,
    Define,
    Descriptor,
    Hello,
    Nack,
    Put,
    Welcome,
    decode_daemon,
    encode,
)
from tests.kit import forking

ARENA_NBYTES = 1 << 20
FUTURE_WRITE = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | FUTURE_WRITE
PATIENCE_S = 30.0


_numbers = itertools.count()


class DaemonProcess:
    """`python -m capd serve` with its log in a file; ready once constructed."""

    def __init__(self, store: Path, endpoint: Path, *options: str, wait: bool = True, **popen: Any) -> None:
        self.store, self.path = store, endpoint
        self.log = endpoint.with_name(f"log-{next(_numbers)}")
        command = [
            sys.executable,
            "-m",
            "capd",
            "serve",
            "--store",
            str(store),
            "--endpoint",
            f"unix:{endpoint}",
        ]
        with self.log.open("ab") as log:
            self.process = forking.popen([*command, "--node", "n", *options], stderr=log, **popen)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        wait_for(
            lambda: "listening on unix:" in self.text() or self.process.poll() is not None, "daemon ready"
        )
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.log.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def ask(self, message: ClientMessage) -> DaemonMessage:
        with tool(self.path) as connection:
            connection.send_bytes(encode(message))
            return receive(connection)

    def stats(self, run_id: str | None = None) -> dict[str, Any]:
        reply = self.ask(Stats(run_id))
        assert isinstance(reply, StatsReply)
        return reply.stats

    def run_stats(self, run_id: str) -> dict[str, Any]:
        runs = self.stats(run_id)["runs"]
        return runs[0] if runs else {}

    def open_links(self) -> list[str]:
        """What the daemon's descriptors point to; one that is closed meanwhile is left out."""
        found = []
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(entry))
        return found

    def control(self, verb: str, run_id: str | None = None) -> ControlReply:
        reply = self.ask(Control(verb, run_id))
        assert isinstance(reply, ControlReply)
        return reply


@contextlib.contextmanager
def daemons() -> Iterator[list[DaemonProcess]]:
    """A list for daemons that must not outlive the block."""
    made: list[DaemonProcess] = []
    try:
        yield made
    finally:
        for daemon in made:
            daemon.process.kill()
            daemon.process.wait()
            for run in daemon.store.glob("*.zarr"):
                # What a killed flight recorder holds waits for the next daemon, which never comes.
                discard_held(run)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The condition's value once it is true; fails after the deadline."""
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


def open_socket(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    sock.settimeout(None)  # a timeout would make it non-blocking, which Connection does not expect
    return sock


@contextlib.contextmanager
def tool(path: Path) -> Iterator[Connection]:
    sock = open_socket(path)
    with contextlib.suppress(BrokenPipeError):  # sent away before it spoke; the answer is there
        sock.sendall(TOOL_BYTE)
    connection = Connection(sock.detach())
    try:
        yield connection
    finally:
        connection.close()


def receive(connection: Connection, timeout_s: float = PATIENCE_S) -> DaemonMessage:
    assert connection.poll(timeout_s), "the daemon says nothing"
    return decode_daemon(connection.recv_bytes(MAX_FRAME_NBYTES))


def make_memory(nbytes: int = ARENA_NBYTES, seals: int = SEALS) -> tuple[int, mmap.mmap]:
    """An arena's descriptor, and the mapping through which alone it can be written once it is sealed."""
    fd = os.memfd_create("test-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, struct.pack("Q", COUNTER_MAGIC), 0)
    memory = mmap.mmap(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, memory


def make_memfd(nbytes: int = ARENA_NBYTES, seals: int = SEALS) -> int:
    """An arena's descriptor alone."""
    fd, memory = make_memory(nbytes, seals)
    memory.close()
    return fd


class Rank:
    """A rank under the test's control: one arena, any number of connections."""

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        run_id: str | None = "run",
        client: bytes = b"",
        arena_nbytes: int = ARENA_NBYTES,
    ) -> None:
        self.path, self.rank, self.run_id = path, rank, run_id
        self.client = client or uuid.uuid4().bytes
        self.ordinal = 0
        self.fd, self.memory = make_memory(arena_nbytes)
        self.connection: Connection | None = None
        self.acked: set[int] = set()
        self.nacked: dict[int, tuple[DropReason, str]] = {}
        self.others: list[DaemonMessage] = []

    def hello(self, **changes: Any) -> Hello:
        fields: dict[str, Any] = {
            "protocol": 2, "client": self.client, "connection": self.ordinal, "run_id": self.run_id,
            "rank": self.rank, "host": "test", "pid": os.getpid(), "arena_nbytes": len(self.memory),
        }  # fmt: skip
        return Hello(**{**fields, **changes})

    def open(self, *, fds: list[int] | None = None, **changes: Any) -> DaemonMessage:
        """Connect anew and say HELLO; returns the answer."""
        self.ordinal += 1
        sock = open_socket(self.path)
        with contextlib.suppress(OSError):  # refused already; the answer is there
            socket.send_fds(sock, [ARENA_BYTE], [self.fd] if fds is None else fds)
        self.connection = Connection(sock.detach())
        with contextlib.suppress(OSError):
            self.send(self.hello(**changes))
        return receive(self.connection)

    def connect(self, **changes: Any) -> Welcome:
        answer = self.open(**changes)
        assert isinstance(answer, Welcome), answer
        self.send(DEFINE)
        return answer

    def send(self, message: ClientMessage) -> None:
        assert self.connection is not None
        self.connection.send_bytes(encode(message))

    def count(self, offered: int = 0, in_flight: int = 0, **drops: int) -> None:
        """Write the counter page."""
        words = [drops.get(reason.value, 0) for reason in DROP_REASONS]
        self.memory[8 : 8 * (4 + len(words))] = struct.pack(
            f"{3 + len(words)}Q", offered, 0, in_flight, *words
        )

    def put(self, *sequences: int, key_id: int = 0, slot: int | None = None) -> None:
        """Write `payload(sequence)` into a slot each and describe it."""
        items = []
        for sequence in sequences:
            offset = PAGE_NBYTES + 64 * (sequence if slot is None else slot)
            self.memory[offset : offset + 8] = payload(sequence)
            items.append(Descriptor(sequence, offset, 8, key_id, (4,), Moment(iteration=sequence)))
        self.send(Put(items))

    def listen_until(self, condition: Callable[[], Any], what: str) -> None:
        """Take the daemon's messages until the condition holds."""
        assert self.connection is not None
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, f"not within {PATIENCE_S} s: {what}"
            if not self.connection.poll(0.05):
                continue
            message = decode_daemon(self.connection.recv_bytes(MAX_FRAME_NBYTES))
            if isinstance(message, Ack):
                self.acked.update(n for first, last in message.ranges for n in range(first, last + 1))
            elif isinstance(message, Nack):
                self.nacked |= {row.sequence: (DROP_REASONS[row.reason], row.message) for row in message.rows}
            else:
                self.others.append(message)

    def expect_acks(self, *sequences: int) -> None:
        self.listen_until(lambda: self.acked >= set(sequences), f"ACK of {sequences}, have {self.acked}")

    def expect(self, kind: type) -> DaemonMessage:
        self.listen_until(
            lambda: any(isinstance(m, kind) for m in self.others), f"{kind.__name__}, have {self.others}"
        )
        found = next(message for message in self.others if isinstance(message, kind))
        self.others.remove(found)
        return found

    def bye(self) -> None:
        self.send(Bye())
        self.expect(ByeOk)

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def close(self) -> None:
        self.disconnect()
        self.memory.close()
        os.close(self.fd)


DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="bfloat16")


def payload(sequence: int) -> bytes:
    return struct.pack("<4H", sequence & 0xFFFF, 1, 2, 3)


def stored_payloads(run: Path) -> list[bytes]:
    """The small test records of a sealed run, read with zarr alone, in record order."""
    import zarr

    [data] = run.glob("*/*/*/*/*/data")
    array = zarr.open_array(data, mode="r")
    return [bytes(array[number].tobytes()) for number in range(array.shape[0])]
