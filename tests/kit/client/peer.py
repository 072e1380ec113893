"""A small daemon for the client's tests: real socket, real arena mapping, behaviour chosen by the test."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from capd_client.protocol.control import Drained, Keep, KeepReply, Steered
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.key import Key
from capd_client.protocol.messages import (
    MAX_FRAME_NBYTES,
    PROTOCOL_VERSION,
    Ack,
    Bye,
    ByeOk,
    Define,
    Descriptor,
    DropRow,
    Drops,
    Flush,
    Flushed,
    Hello,
    Nack,
    NackRow,
    Ping,
    Pong,
    Put,
    Reject,
    Welcome,
    decode_client,
    encode,
)
from capd_client.protocol.statistics_row import ROW_NBYTES


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Return once `condition()` holds; fail the test after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.002)


@dataclass
class Record:
    """One capture as it arrived."""

    key: Key
    dtype: str
    attributes: dict[str, Any]
    descriptor: Descriptor
    data: bytes
    row: bytes  # the statistics row that the rank computed, or nothing


@dataclass
class Peer:
    """Accepts ranks one after the other on `path`, each on a thread of its own.

    ack: whether PUTs are acknowledged. welcome: whether HELLO is answered. pong: whether PINGs are. reject: sent
    instead of WELCOME. nack: reason index with which every PUT is refused. `hold` stops all reading while it is set:
    at the latest once `holding` is.
    """

    path: str
    ack: bool = True
    welcome: bool = True
    pong: bool = True
    reject: Reject | None = None
    nack: int | None = None
    records: list[Record] = field(default_factory=list)
    puts: list[tuple[int, int]] = field(default_factory=list)  # (connection, sequence) in order of arrival
    hellos: list[Hello] = field(default_factory=list)
    drops: dict[tuple[Key, str, int], DropRow] = field(default_factory=dict)
    byes: int = 0
    pings: int = 0
    taken: set[tuple[bytes, int]] = field(default_factory=set)  # (client, sequence) of the records
    words: list[int] = field(default_factory=list)  # the counter page when BYE came
    last_words: list[int] = field(default_factory=list)  # the counter page when the newest connection ended
    seals: list[int] = field(default_factory=list)
    steered: list[Steered] = field(default_factory=list)
    drained: list[Drained] = field(default_factory=list)
    keeps: list[Keep] = field(default_factory=list)
    kept: bool = True  # whether KEEPs are answered
    kept_problem: str = ""

    def __post_init__(self) -> None:
        self.hold = threading.Event()
        self.holding = threading.Event()
        self._stop = threading.Event()
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._listener.settimeout(0.02)
        thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """Stop like a killed daemon: sockets close, the path vanishes."""
        self._stop.set()
        self.hold.clear()
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def data_of(self, tensor_name: str) -> list[bytes]:
        """The bytes of every record of this name, in order."""
        return [record.data for record in self.records if record.key.tensor_name == tensor_name]

    def acknowledge_all(self) -> None:
        """Acknowledge every sequence that ever came, on the newest connection."""
        sequences = sorted({sequence for _, sequence in self.puts})
        self._connections[-1].send_bytes(encode(Ack([(s, s) for s in sequences])))

    def send(self, message: Any) -> None:
        """Send one message on the newest connection."""
        self._connections[-1].send_bytes(encode(message))

    def answer_hello(self) -> None:
        """Send the WELCOME that `welcome` held back, on the newest connection."""
        self.send(_welcome(self.hellos[-1]))

    def send_raw(self, frame: bytes) -> None:
        """Send one frame of anything; the other side may hang up before it has read it all.

        Then the thread that serves the connection closes it under this one's hands: a TypeError in mid-frame.
        """
        with contextlib.suppress(OSError, TypeError):
            self._connections[-1].send_bytes(frame)

    def send_piece(self, piece: bytes) -> None:
        """Send some bytes of a frame, or of several."""
        with socket.socket(fileno=os.dup(self._connections[-1].fileno())) as stream:
            stream.sendall(piece)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            if self.hold.is_set():
                self.hold_until_released()
            thread = threading.Thread(target=self._serve, args=(peer,), name="peer", daemon=True)
            thread.start()
            self._threads.append(thread)

    def hold_until_released(self) -> None:
        self.holding.set()
        while self.hold.is_set() and not self._stop.is_set():
            time.sleep(0.002)
        self.holding.clear()

    def _serve(self, peer: socket.socket) -> None:
        peer.settimeout(5)
        arena: mmap.mmap | None = None
        try:
            byte, fds, _, _ = socket.recv_fds(peer, 1, 4)
            if byte != b"A" or len(fds) != 1:
                peer.close()
                return
            arena = self._map(fds[0])
            peer.setblocking(True)
            connection = Connection(peer.detach())
            self._connections.append(connection)
            self._talk(connection, arena)
        except (EOFError, OSError):
            return
        finally:
            peer.close()
            if arena is not None:
                arena.close()

    def _map(self, fd: int) -> mmap.mmap:
        import fcntl

        self.seals.append(fcntl.fcntl(fd, 1034))
        arena = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(fd)
        return arena

    def _talk(self, connection: Connection, arena: mmap.mmap) -> None:
        defines: dict[int, Define] = {}
        number = 0
        try:
            while not self._stop.is_set():
                if self.hold.is_set():
                    self.hold_until_released()
                    continue
                if not connection.poll(0.005):
                    continue
                message = decode_client(connection.recv_bytes(MAX_FRAME_NBYTES))
                if isinstance(message, Hello):
                    number, client = message.connection, message.client
                    self.hellos.append(message)
                    assert message.arena_nbytes == len(arena)
                    if self.reject is not None:
                        connection.send_bytes(encode(self.reject))
                    elif self.welcome:
                        connection.send_bytes(encode(_welcome(message)))
                elif isinstance(message, Define):
                    defines[message.id] = message
                elif isinstance(message, Put):
                    self._put(connection, arena, defines, message, number, client)
                elif isinstance(message, Drops):
                    for row in message.rows:
                        define = defines[row.key_id]
                        self.drops[define.key, define.dtype, row.reason] = row
                elif isinstance(message, Flush):
                    connection.send_bytes(encode(Flushed(message.id)))
                elif isinstance(message, Steered):
                    self.steered.append(message)
                elif isinstance(message, Keep):
                    self.keeps.append(message)
                    if self.kept:
                        connection.send_bytes(encode(KeepReply(message.id, self.kept_problem)))
                elif isinstance(message, Drained):
                    self.drained.append(message)
                elif isinstance(message, Ping):
                    self.pings += 1
                    if self.pong:
                        connection.send_bytes(encode(Pong()))
                elif isinstance(message, Bye):
                    self.words = memoryview(arena)[:PAGE_NBYTES].cast("Q").tolist()
                    self.byes += 1
                    connection.send_bytes(encode(ByeOk()))
        finally:
            self.last_words = memoryview(arena)[:PAGE_NBYTES].cast("Q").tolist()
            connection.close()

    def _put(
        self,
        connection: Connection,
        arena: mmap.mmap,
        defines: dict[int, Define],
        put: Put,
        number: int,
        client: bytes,
    ) -> None:
        for item in put.items:
            define = defines[item.key_id]
            self.puts.append((number, item.sequence))
            if (client, item.sequence) not in self.taken:
                self.taken.add((client, item.sequence))
                data = in_c_order(item, bytes(arena[item.offset : item.offset + item.nbytes]))
                at = item.row_offset
                row = b"" if at is None else bytes(arena[at : at + ROW_NBYTES])
                self.records.append(Record(define.key, define.dtype, define.attributes, item, data, row))
        if self.nack is not None:
            rows = [NackRow(item.sequence, self.nack, "refused by the test") for item in put.items]
            connection.send_bytes(encode(Nack(rows)))
        elif self.ack:
            connection.send_bytes(encode(Ack([(item.sequence, item.sequence) for item in put.items])))


def in_c_order(item: Descriptor, data: bytes) -> bytes:
    """What lies in a slot, with the last of the tensor's axes innermost."""
    if item.order is None:
        return data
    lies = np.frombuffer(data, dtype=f"u{len(data) // math.prod(item.shape)}")
    return lies.reshape([item.shape[axis] for axis in item.order]).transpose(np.argsort(item.order)).tobytes()


def _welcome(hello: Hello) -> Welcome:
    return Welcome(
        protocol=PROTOCOL_VERSION, epoch=b"e" * 16, run_id=hello.run_id or "test", store="/store", version="0"
    )
