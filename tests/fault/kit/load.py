"""The load of the fault tests: deterministic captures, a log of what was offered and acknowledged, and a rank.

Capture `n` of a rank is always the same bytes under the same name, in sizes that take every way into the
store: records of the small log, one chunk, several chunks, ragged shapes, records without an element. The log
is written outside of the store, an `ack` line only after the daemon said so, and is what `check.py` believes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from capd_client.protocol.counter_page import COUNTER_MAGIC, DROP_REASONS, PAGE_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    ARENA_BYTE,
    MAX_FRAME_NBYTES,
    Ack,
    Bye,
    ByeOk,
    DaemonMessage,
    Define,
    Descriptor,
    Hello,
    Nack,
    Put,
    Reject,
    Welcome,
    decode_daemon,
    encode,
)
from tests.fault.kit.journals import digest
from tests.kit.daemon import make_memory, open_socket

ARENA_NBYTES = 32 << 20
MAX_IN_FLIGHT = 24


class Capture(NamedTuple):
    """What a rank offers: a tensor's name, torch dtype, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    payload: bytes


class Gone(Exception):
    """The daemon is not there, or not any more."""


def capture(rank: int, n: int) -> Capture:
    """Capture `n` of a rank, one of five kinds."""
    if n % 48 == 7:
        return _capture("large", "bfloat16", (3, 1024, 1024), 2, rank, n)
    if n % 8 == 2:
        return _capture("ragged", "float16", (n // 8 % 7, 64), 2, rank, n)
    if n % 8 == 4:
        return _capture("medium", "float32", (300, 256), 4, rank, n)
    if n % 8 == 6:
        return _capture("wide", "int16", (100 + n * 37 % 300, 512), 2, rank, n)
    return _capture("small", "bfloat16", (16, 128), 2, rank, n)


def small_capture(rank: int, n: int) -> Capture:
    """Like `capture`, but never larger than 300 KiB: for file systems of a few MiB."""
    return capture(rank, n) if n % 48 != 7 else _capture("small", "bfloat16", (16, 128), 2, rank, n)


def _capture(name: str, dtype: str, shape: tuple[int, ...], itemsize: int, rank: int, n: int) -> Capture:
    nbytes = itemsize * int(np.prod(shape))
    noise = np.random.Generator(np.random.PCG64([rank, n])).bytes(min(nbytes, 16 << 10))
    pages = nbytes // (16 << 10) + 1
    turned = np.frombuffer(noise * pages, dtype=np.uint8)[:nbytes].copy()
    turned += np.repeat(np.arange(pages, dtype=np.uint8), 16 << 10)[
        :nbytes
    ]  # a shift by pages is a wrong value
    return Capture(name, dtype, shape, turned.tobytes())


class ExpectedLog:
    """JSON lines of what was offered and what was acknowledged or refused, for any number of ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offered = self.acked = self.refused = 0
        self._file: IO[str] = path.open("a", buffering=1)

    def offer(self, rank: int, n: int, what: Capture) -> None:
        """Note an offer; before the daemon hears of it."""
        self.offered += 1
        self._line("offer", rank, n, name=what.name, hash=digest(what.shape, what.payload))

    def ack(self, rank: int, n: int) -> None:
        """Note an acknowledgement."""
        self.acked += 1
        self._line("ack", rank, n)

    def refuse(self, rank: int, n: int) -> None:
        """Note that the daemon gave a capture up."""
        self.refused += 1
        self._line("refuse", rank, n)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, operation: str, rank: int, n: int, **more: str) -> None:
        self._file.write(json.dumps({"op": operation, "rank": rank, "id": n, **more}) + "\n")


class LoadRank:
    """A rank that offers captures as fast as its arena allows and sends again what was not answered.

    `captures` names what capture n is. Every method that speaks to the daemon raises Gone when it is not
    there any more; `connect` goes on with a new one.
    """

    def __init__(self, path: Path, log: ExpectedLog, rank: int = 0, *, captures=capture) -> None:  # type: ignore[no-untyped-def]
        self.path, self.log, self.rank, self.captures = path, log, rank, captures
        self.next = 0
        self.in_flight: dict[int, tuple[int, Capture]] = {}  # n → arena offset, capture
        self.refusals: dict[int, tuple[str, str]] = {}
        self._client, self._ordinal = uuid.uuid4().bytes, 0
        self._fd, self._memory = make_memory(ARENA_NBYTES)
        self._connection: Connection | None = None
        self._keys: dict[tuple[str, str], int] = {}

    def connect(self) -> None:
        """Say HELLO on a new connection and send again, in order, everything without an answer."""
        self.disconnect()
        self._ordinal += 1
        try:
            sock = open_socket(self.path)
            socket.send_fds(sock, [ARENA_BYTE], [self._fd])
        except OSError as error:
            raise Gone(str(error)) from error
        self._connection, self._keys = Connection(sock.detach()), {}
        self._send(
            Hello(
                protocol=2, client=self._client, connection=self._ordinal, run_id="run", rank=self.rank,
                host="test", pid=os.getpid(), arena_nbytes=ARENA_NBYTES,
            )
        )  # fmt: skip
        answer = self._receive(30.0)
        if not isinstance(answer, Welcome):
            raise Gone(str(answer))
        for n, (offset, what) in sorted(self.in_flight.items()):
            self._put(n, offset, what)

    def offer(self, count: int = 1) -> None:
        """Offer the next `count` captures; waits for answers where the arena is full."""
        for _ in range(count):
            what = self.captures(self.rank, self.next)
            while len(self.in_flight) >= MAX_IN_FLIGHT or (offset := self._room(len(what.payload))) is None:
                self.listen(10.0)
            n = self.next
            self.next += 1
            self._memory[offset : offset + len(what.payload)] = what.payload
            self.in_flight[n] = offset, what
            self.log.offer(self.rank, n, what)
            self._count()
            self._put(n, offset, what)
        self.listen(0.0)

    def drain(self) -> None:
        """Wait until everything is answered."""
        while self.in_flight:
            self.listen(30.0)

    def listen(self, timeout_s: float) -> None:
        """Take what the daemon says: the first message may take `timeout_s`, which without one is an error."""
        heard = False
        try:
            while self._connection is not None and self._connection.poll(0.0 if heard else timeout_s):
                self._take(self._receive(0.0))
                heard = True
        except OSError as error:
            raise Gone(str(error)) from error
        if self._connection is None:
            raise Gone("not connected")
        assert heard or timeout_s == 0.0, f"the daemon says nothing for {timeout_s} s"

    def bye(self) -> None:
        """Leave in order, once everything is answered."""
        self.drain()
        self._send(Bye())
        while not isinstance(self._receive(30.0), ByeOk):
            pass
        self.disconnect()

    def disconnect(self) -> None:
        """Drop the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Give up the connection and the arena."""
        self.disconnect()
        self._memory.close()
        os.close(self._fd)

    def _take(self, message: DaemonMessage) -> None:
        if isinstance(message, Ack):
            for first, last in message.ranges:
                for n in range(first, last + 1):
                    if self.in_flight.pop(n, None) is not None:
                        self.log.ack(self.rank, n)
        elif isinstance(message, Nack):
            for row in message.rows:
                if self.in_flight.pop(row.sequence, None) is not None:
                    self.refusals[row.sequence] = DROP_REASONS[row.reason].value, row.message
                    self.log.refuse(self.rank, row.sequence)
        elif isinstance(message, Reject):
            raise Gone(message.message)
        self._count()

    def _put(self, n: int, offset: int, what: Capture) -> None:
        kind = what.name, what.dtype
        if kind not in self._keys:
            self._keys[kind] = len(self._keys)
            key = Key(quant_type="bf16", rank=self.rank, tensor_name=what.name, layer=0)
            self._send(Define(id=self._keys[kind], key=key, dtype=what.dtype))
        moment = Moment(iteration=n)
        self._send(Put([Descriptor(n, offset, len(what.payload), self._keys[kind], what.shape, moment)]))

    def _room(self, nbytes: int) -> int | None:
        """The first gap of the arena that holds `nbytes`, aligned to 64 bytes, or None."""
        at = PAGE_NBYTES
        for offset, what in sorted(self.in_flight.values(), key=lambda held: held[0]):
            if offset - at >= max(1, nbytes):
                return at
            at = (offset + max(1, len(what.payload)) + 63) // 64 * 64
        return at if ARENA_NBYTES - at >= nbytes else None

    def _count(self) -> None:
        words = [
            COUNTER_MAGIC,
            self.next,
            self.next - len(self.in_flight) - len(self.refusals),
            len(self.in_flight),
        ]
        self._memory[0:32] = struct.pack("4Q", *words)

    def _send(self, message: Hello | Define | Put | Bye) -> None:
        if self._connection is None:
            raise Gone("not connected")
        try:
            self._connection.send_bytes(encode(message))
        except OSError as error:
            # What it said before it went is still to be read: an unread acknowledgement is an acknowledgement.
            with contextlib.suppress(Gone, OSError, AssertionError):
                self.listen(0.1)
            raise Gone(str(error)) from error

    def _receive(self, timeout_s: float) -> DaemonMessage:
        assert self._connection is not None
        try:
            assert self._connection.poll(timeout_s), f"the daemon says nothing for {timeout_s} s"
            return decode_daemon(self._connection.recv_bytes(MAX_FRAME_NBYTES))
        except (OSError, EOFError) as error:
            raise Gone(str(error)) from error
