"""What several ranks of a node have to say alike is said once, by local rank 0, with the ranks that say it.

Every rank hands its lines to local rank 0, through a socket whose name the node's ranks derive alike. A line that all
of them have handed over is said at once, any other one after GATHER_S. Where rank 0 does not listen within that time,
or its socket is full, a rank says its lines itself. A rank that is killed loses none that it has handed over.
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

GATHER_S = 5.0  # ranks of one job reach the same line with no more than this between them
_RETRY_S = 0.05
_END_S = 2.0
_MAX_NBYTES = 1 << 20
_BACKLOG = 128


class Line(msgspec.Struct, array_like=True):
    """What one rank says, at a level of `logging`."""

    rank: int
    level: int
    text: str


_decode = msgspec.msgpack.Decoder(Line).decode
Say = Callable[[int, str], None]


class Together:
    """The lines of this process among those of its node. say: writes one, with its level."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._alone = False
        self._gatherer: Optional[_Gatherer] = None
        self._courier: Optional[_Courier] = None
        self._lock = threading.RLock()  # re-entrant: a signal handler of the job may capture

    def tell(self, info: RankInfo, level: int, text: str) -> None:
        """Have a line said. At once where nobody else could say the same."""
        line = Line(info.rank, level, text)
        if info.world_size < 2:
            self._say(level, text)
        elif info.local_world_size < 2 or self._alone or multiprocessing.parent_process() is not None:
            say_alone(self._say, line)  # helpers of a rank end in ways of their own
        else:
            self._hand_over(info, line)

    def end(self) -> None:
        """The process ends: nothing waits any longer."""
        self._alone = True
        for helper in (self._courier, self._gatherer):
            if helper is not None:
                helper.end()
        self._courier = self._gatherer = None

    def forked(self) -> None:
        """In a forked child, which is no rank."""
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
        except (OSError, RuntimeError) as error:  # somebody has the name, or no further thread is allowed
            if is_interruption(error):
                raise
            say_alone(self._say, line)


def say_alone(say: Say, line: Line) -> None:
    """Without waiting for others."""
    say(line.level, f"rank {line.rank}: {line.text}")


class _Courier:
    """Waits for rank 0 to listen, in the place of the thread that trains."""

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
        """Say what is left."""
        self._over.set()
        self._lines.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (taken := self._lines.get()) is not None:
            deadline, line = taken
            while not _sent(self._address, line):
                if self._over.is_set() or time.monotonic() > deadline:
                    with suppress(Exception):  # the user's handler ends no thread of ours
                        say_alone(self._say, line)
                    break
                self._over.wait(_RETRY_S)


class _Gatherer:
    """Local rank 0's: takes the lines of all, and says each of them once.

    Raises OSError where it cannot listen, RuntimeError where no further thread is allowed.
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
        """Say what is waiting."""
        self._over.set()
        _sent(self._address, None)  # wakes the thread; where that fails, others do
        self._thread.join(_END_S)
        self.listener.close()

    def _run(self) -> None:
        while not self._over.is_set():
            times = [deadline for deadline, _ in self._waiting.values()]
            self.listener.settimeout(max(0.001, min(times) - time.monotonic()) if times else None)
            with suppress(OSError):
                self._take(self.listener.accept()[0])
            self._say_due(over=False)
        self.listener.shutdown(socket.SHUT_RD)  # what is sent from now on is refused: nothing is lost between
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
                line = _decode(_received(peer))
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


def _received(peer: socket.socket) -> bytes:
    """What the peer sends. One that is stopped between connecting and sending is told that it failed."""
    try:
        return peer.recv(_MAX_NBYTES)
    except TimeoutError:
        peer.shutdown(socket.SHUT_RD)
        return peer.recv(_MAX_NBYTES)


def _sent(address: str, line: Optional[Line]) -> bool:
    """Whether rank 0 has the line now. Waits for nobody."""
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
    """Whether a process of our user is at the other end: any user may listen under any name."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())
