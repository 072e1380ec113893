"""The copy pump: the thread that finishes the copies of one device and issues those that are due.

It waits for the oldest copy without the interpreter's lock, and issues more while enough is still under way: so the
link does not wait for it. It does not hurry where nobody waits for it. What comes within 5 ms is brought home
together, and no training thread has to wake it for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from capd_client.device.ring import Ring
from capd_client.device.seam import Device
from capd_client.device.transfers import Transfers
from capd_client.process.wakeup import Wakeup

__all__ = ["LINGER_S", "Pump"]

LINGER_S = 0.005
_TICK_S = 0.001  # where what it waits for gives no sign
_IDLE_S = 1.0  # a signal handler that raises may keep a training thread from waking it
_HURRY_S = 0.1  # longer than the client thread rests while somebody waits
_JOIN_S = 1.0


class Pump:
    """Advances the transfers of one device in a thread of its own, until the device fails or `stop`.

    ring: where it is half full somebody will soon wait for it. failed: called with the error of a device.
    """

    def __init__(
        self, device: Device, transfers: Transfers, ring: Ring, failed: Callable[[Exception], None]
    ) -> None:
        self._device = device
        self._transfers = transfers
        self._ring = ring
        self._failed = failed
        self._stopping = threading.Event()
        self._hurried_until = 0.0
        self._idle = False
        self._doze = Wakeup(0.0)
        self._thread = threading.Thread(target=self._run, name="capd-copies", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError where no further one is allowed."""
        self._thread.start()

    def wake(self) -> None:
        """Something was handed over. Cheap; ends a rest only where it is urgent, or long."""
        if self._doze.dozing and (self._idle or self._pressed()):
            self._doze.wake()

    def hurry(self) -> None:
        """Somebody waits for what is pending now, and says so again as long as that is so."""
        if self._transfers.pending:
            self._hurried_until = time.monotonic() + _HURRY_S
            self._doze.end()

    def stop(self) -> None:
        """End the thread, or leave it to the process where it hangs in the device."""
        self._stopping.set()
        self._doze.end()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._device.enter_thread()
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:
            self._failed(error)

    def _turn(self) -> None:
        transfers = self._transfers
        if not transfers.pending:
            self._idle = True
            self._doze.rest(_IDLE_S, self._called)
            self._idle = False
            if not self._called():
                return
            self._linger()
        transfers.advance()
        oldest = transfers.oldest()
        if not self._pressed():
            if transfers.pending:
                self._linger()
        elif oldest is not None:
            self._device.wait(oldest)
        else:  # copies that may not go yet
            self._stopping.wait(_TICK_S)

    def _linger(self) -> None:
        left_s = self._transfers.left_s
        self._doze.rest(min(LINGER_S, left_s) if left_s else LINGER_S, self._pressed)

    def _called(self) -> bool:
        return self._transfers.pending or self._stopping.is_set()

    def _pressed(self) -> bool:
        """Whether more is to be done at once: somebody waits, or soon will."""
        hurried = self._hurried_until and time.monotonic() < self._hurried_until
        return bool(hurried or self._transfers.waiting or not self._ring.roomy or self._stopping.is_set())
