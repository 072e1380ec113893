"""How much of the arena is there: what its highest use needs and a part ahead, and less again after a long quiet.

Pages are made ahead of their use, twice as many as were ever in use at once; most jobs need a small part of what the
arena may take. Sealed memory gives no page back, so less of it means fresh memory in its place, which the daemon is
given by a HELLO. That happens at a moment at which nothing is in flight, and HELLO is in the socket before the first
capture goes to the new memory: of a rank that dies then, counters and captures are found there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Optional

from capd_client.arena.arena import Arena
from capd_client.device.devices import Devices
from capd_client.errors import ArenaError
from capd_client.inflight.queue import Queue
from capd_client.protocol.messages import Hello
from capd_client.transport.link import Link

__all__ = ["FIRST_NBYTES", "Growth"]

FIRST_NBYTES = 32 << 20
QUIET_S = 60.0  # what was not in use for so long is given back
_WORTH_NBYTES = 64 << 20  # less is not worth a HELLO


class Growth:
    """Keeps an arena as large as it must be. `look` and `shrink` are the client thread's.

    hello: of the n-th connection.
    """

    def __init__(
        self,
        arena: Arena,
        queue: Queue,
        devices: Devices,
        endpoint: str,
        hello: Callable[[int], Hello],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arena = arena
        self._queue = queue
        self._devices = devices
        self._endpoint = endpoint
        self._hello = hello
        self._clock = clock
        self._peak = 0  # bytes in use at once since `_since`
        self._since = clock()

    def look(self) -> bool:
        """Have pages made ahead of the highest use; whether a long quiet has left many more than it needed."""
        slots, arena = self._queue.slots, self._arena
        used = slots.capacity - slots.free_nbytes
        if used > self._peak:
            self._peak = used
        if arena.start + 2 * used > arena.target or arena.populated < arena.target:
            with contextlib.suppress(RuntimeError):  # no further thread is allowed: pages come at first touch
                arena.grow(max(FIRST_NBYTES, 2 * used))
        now = self._clock()
        if now - self._since < QUIET_S:
            return False
        if arena.target - arena.start >= max(FIRST_NBYTES, 2 * self._peak) + _WORTH_NBYTES:
            return True
        self._peak, self._since = used, now
        return False

    def shrink(self, connection: int) -> Optional[Link]:
        """Go on with fresh memory, if nothing is in flight and no device copies: its connection, HELLO sent."""
        if not self._is_idle() or not self._arena.prefaulted(0):
            return None
        needed = max(FIRST_NBYTES, 2 * self._peak)
        self._peak, self._since = 0, self._clock()  # whatever comes of it, not again at once
        try:
            link = Link(self._endpoint)
        except OSError:
            return None
        hello, replaced = self._hello(connection), False
        try:
            with self._devices.unlocked() as unlocked:
                self._arena.unload()
                with self._queue.lock:
                    if unlocked and self._is_idle():
                        self._arena.replace(self._queue.journal.lasting, lambda fd: link.greet(fd, hello))
                        self._queue.journal.restart()
                        replaced = True
        except (ArenaError, OSError):
            pass  # as it was; a daemon that has the HELLO already is told so by the next one
        if not replaced:
            link.close()
            return None
        self._arena.free_old()
        with contextlib.suppress(RuntimeError):
            self._arena.grow(needed)
        return link

    def _is_idle(self) -> bool:
        """Whether nothing writes to the arena, nor anybody reads it."""
        return not self._queue.busy and not self._queue.copying and self._queue.slots.empty
