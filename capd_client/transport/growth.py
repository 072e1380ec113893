"""The growth of the arena: its pages follow the highest use, and become fewer after a long quiet time.

Pages are made before their use, twice as many as were ever in use at once. Most jobs need only a small part of the
arena's limit. Sealed memory gives no page back. So a smaller arena is new memory, and a HELLO hands it to the daemon.
This happens while nothing is in flight. HELLO is in the socket before the first capture goes to the new memory. So
the daemon finds counters and captures there if the rank dies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Optional

from capd_client.arena.arena import Arena
from capd_client.device.devices import Devices
from capd_client.inflight.queue import Queue
from capd_client.protocol.messages import Hello
from capd_client.transport.link import Link

__all__ = ["FIRST_NBYTES", "Growth"]

FIRST_NBYTES = 32 << 20
# Pages that were unused for this time are given back.
QUIET_S = 60.0
# Fewer bytes are not worth a HELLO.
_WORTH_NBYTES = 64 << 20


class Growth:
    """The size control of one arena. Only the client thread calls `look` and `shrink`.

    Args:
        arena: The arena.
        queue: The in-flight queue.
        devices: The devices that copy to the arena.
        endpoint: The socket of the daemon.
        hello: Makes the HELLO of the n-th connection.
        clock: A monotonic clock.
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
        # The most bytes in use at once since `_since`.
        self._peak = 0
        self._since = clock()

    def look(self) -> bool:
        """Let pages be made before the use reaches them. Return whether a quiet time needed far fewer pages."""
        slots, arena = self._queue.slots, self._arena
        used = slots.capacity - slots.free_nbytes
        if used > self._peak:
            self._peak = used
        if arena.start + 2 * used > arena.target or arena.populated < arena.target:
            # If the system allows no further thread, pages are made at the first touch.
            with contextlib.suppress(RuntimeError):
                arena.grow(max(FIRST_NBYTES, 2 * used))
        now = self._clock()
        if now - self._since < QUIET_S:
            return False
        if arena.target - arena.start >= max(FIRST_NBYTES, 2 * self._peak) + _WORTH_NBYTES:
            return True
        self._peak, self._since = used, now
        return False

    def shrink(self, connection: int) -> Optional[Link]:
        """Replace the arena's memory by new memory, if nothing is in flight and no device copies.

        Args:
            connection: The number of the new connection.

        Returns:
            The new connection with HELLO sent, or None if nothing has changed.
        """
        if not self._is_idle() or not self._arena.prefaulted(0):
            return None
        needed = max(FIRST_NBYTES, 2 * self._peak)
        # The next attempt is later, also if this one fails.
        self._peak, self._since = 0, self._clock()
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
        except OSError:
            # Nothing has changed. If the daemon has this HELLO already, the next HELLO corrects it.
            pass
        if not replaced:
            link.close()
            return None
        self._arena.free_old()
        with contextlib.suppress(RuntimeError):
            self._arena.grow(needed)
        return link

    def _is_idle(self) -> bool:
        """Return whether nobody writes to the arena or reads it."""
        return not self._queue.busy and not self._queue.copying and self._queue.slots.empty
