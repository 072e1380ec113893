"""Combines equal log lines of a node's ranks: local rank 0 writes each line once, with the ranks that logged it.

Every rank sends its lines to local rank 0, through a socket whose name the node's ranks derive alike. A line from all
ranks is written at once, any other line after GATHER_S. If rank 0 does not listen within that time, or its socket is
full, a rank writes its lines itself. The lines that a killed rank has sent are not lost.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Optional

import msgspec

from capd_client.process.ranks import RankInfo, node_job
from capd_client.process.signals import is_interruption
from capd_client.process.text import number_ranges

__all__ = ["GATHER_S", "Line", "Together"]

# Ranks of one job reach the same line within this time.
GATHER_S = 5.0
_RETRY_S = 0.05
_END_S = 2.0
_MAX_NBYTES = 1 << 20
_BACKLOG = 128


class Line(msgspec.Struct, array_like=True):
    """A log line of one rank, with its level of `logging`."""

    rank: int
    level: int
    text: str


_decode = msgspec.msgpack.Decoder(Line).decode
Say = Callable[[int, str], None]


class Together:
    """The lines of this process, combined with those of its node. `say` writes a line with its level."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._alone = False
        self._gatherer: Optional[_Gatherer] = None
        self._courier: Optional[_Courier] = None
        # Re-entrant, because a signal handler of the job may capture.
        self._lock = threading.RLock()

    def log(self, info: RankInfo, level: int, text: str) -> None:
        """Log a line: at once if no other rank could log the same, else through local rank 0."""
        line = Line(info.rank, level, text)
        if info.world_size < 2:
            self._say(level, text)
        elif info.local_world_size < 2 or self._alone or multiprocessing.parent_process() is not None:
            # A rank's helper processes can end at any time, so their lines do not wait.
            say_alone(self._say, line)
        else:
            self._hand_over(info, line)

    def end(self) -> None:
        """End the waiting: the process ends."""
        self._alone = True
        for helper in (self._courier, self._gatherer):
            if helper is not None:
                helper.end()
        self._courier = self._gatherer = None

    def forked(self) -> None:
        """Reset in a forked child, which is no rank."""
        gatherer, self._gatherer, self._courier, self._alone = self._gatherer, None, None, True
        if gatherer is not None:
            gatherer.listener.close()

    def _hand_over(self, info: RankInfo, line: Line) -> None:
        address = f"\0capd-{os.getuid()}-{node_job()}"
        try:
            with self._lock:
                if info.local_rank == 0 and self._gatherer is None:
                    self._gatherer = _Gatherer(address, info.local_world_size, self._say)
                if not _sent(address, line):
                    self._courier = self._courier or _Courier(address, self._say)
                    self._courier.take(line)
        # Another process has the name, or no further thread is allowed.
        except (OSError, RuntimeError) as error:
            if is_interruption(error):
                raise
            say_alone(self._say, line)


def say_alone(say: Say, line: Line) -> None:
    """Write a line without waiting for other ranks."""
    say(line.level, f"rank {line.rank}: {line.text}")


class _Courier:
    """A thread that waits for rank 0 to listen, so that the training thread does not."""

    def __init__(self, address: str, say: Say) -> None:
        self._address = address
        self._say = say
        self._lines: SimpleQueue[Optional[tuple[float, Line]]] = SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capd-lines", daemon=True)
        self._thread.start()

    def take(self, line: Line) -> None:
        self._lines.put((time.monotonic() + GATHER_S, line))

    def end(self) -> None:
        """Write the remaining lines."""
        self._over.set()
        self._lines.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (taken := self._lines.get()) is not None:
            deadline, line = taken
            while not _sent(self._address, line):
                if self._over.is_set() or time.monotonic() > deadline:
                    # An error of the user's handler must not end this thread.
                    with suppress(Exception):
                        say_alone(self._say, line)
                    break
                self._over.wait(_RETRY_S)


class _Gatherer:
    """Local rank 0's receiver: takes the lines of all ranks, and writes each of them once.

    Raises OSError if it cannot listen, RuntimeError if no further thread is allowed.
    """

    def __init__(self, address: str, ranks: int, say: Say) -> None:
        self._address = address
        self._ranks = ranks
        self._over = threading.Event()
        self._say = say
        self._waiting: dict[tuple[int, str], tuple[float, set[int]]] = {}
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.listener.bind(address)
            self.listener.listen(_BACKLOG)
            self._thread = threading.Thread(target=self._run, name="capd-gatherer", daemon=True)
            self._thread.start()
        except BaseException:
            self.listener.close()
            raise

    def end(self) -> None:
        """Write the lines that still wait."""
        self._over.set()
        # This wakes the thread. If it fails, the connections that fill the socket do so.
        _sent(self._address, None)
        self._thread.join(_END_S)
        self.listener.close()

    def _run(self) -> None:
        while not self._over.is_set():
            times = [deadline for deadline, _ in self._waiting.values()]
            self.listener.settimeout(max(0.001, min(times) - time.monotonic()) if times else None)
            with suppress(OSError):
                self._take(self.listener.accept()[0])
            self._say_due(over=False)
        # Later connections are refused, so no line is lost between the last accept and the close.
        self.listener.shutdown(socket.SHUT_RD)
        self.listener.settimeout(0)
        with suppress(OSError):
            while True:
                self._take(self.listener.accept()[0])
        self._say_due(over=True)

    def _take(self, peer: socket.socket) -> None:
        with peer:
            if not _is_ours(peer):
                return
            peer.settimeout(_RETRY_S)
            try:
                line = _decode(peer.recv(_MAX_NBYTES))
            except (OSError, msgspec.MsgspecError):
                return
        _, ranks = self._waiting.setdefault((line.level, line.text), (time.monotonic() + GATHER_S, set()))
        ranks.add(line.rank)

    def _say_due(self, *, over: bool) -> None:
        now = time.monotonic()
        for (level, text), (deadline, ranks) in tuple(self._waiting.items()):
            if over or now >= deadline or len(ranks) >= self._ranks:
                del self._waiting[level, text]
                with suppress(Exception):
                    self._say(level, f"rank{'s' * (len(ranks) > 1)} {number_ranges(sorted(ranks))}: {text}")


def _sent(address: str, line: Optional[Line]) -> bool:
    """Send a line to rank 0 without waiting; return whether it has arrived."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.setblocking(False)
        try:
            peer.connect(address)
            return _is_ours(peer) and peer.send(msgspec.msgpack.encode(line)) > 0
        except OSError as error:
            if is_interruption(error):
                raise
            return False


def _is_ours(peer: socket.socket) -> bool:
    """Whether a process of our user is at the other end, because any user may listen under any name."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())
