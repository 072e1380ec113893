"""The copy pump: the thread that finishes the copies of one device and issues those that are due.

The pump waits for the oldest copy without the interpreter's lock. It issues more copies while enough are still under
way, so the link does not wait for the pump. It does not hurry if nobody waits for it. Captures that come within 5 ms
are copied together, and no training thread has to wake the pump.
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
# Used if the awaited thing gives no signal.
_TICK_S = 0.001
# The longest rest. If a signal handler raises in a training thread, that thread may fail to wake the pump.
_IDLE_S = 1.0
# Longer than the client thread rests while somebody waits.
_HURRY_S = 0.1
_JOIN_S = 1.0


class Pump:
    """The thread that advances the transfers of one device, until the device fails or `stop` is called."""

    def __init__(
        self, device: Device, transfers: Transfers, ring: Ring, failed: Callable[[Exception], None]
    ) -> None:
        """Prepare the thread.

        Args:
            device: The device.
            transfers: The copies of the device.
            ring: The device's ring. When it is half full, somebody will soon wait for room.
            failed: Called with an error of the device.
        """
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
        """Start the thread. Raises RuntimeError if the system allows no further thread."""
        self._thread.start()

    def wake(self) -> None:
        """Note that a capture was handed over. Cheap; ends a rest only if it is urgent, or the rest is long."""
        if self._doze.dozing and (self._idle or self._pressed()):
            self._doze.wake()

    def hurry(self) -> None:
        """Note that somebody waits for pending captures. The caller repeats this while it waits."""
        if self._transfers.pending:
            self._hurried_until = time.monotonic() + _HURRY_S
            self._doze.end()

    def stop(self) -> None:
        """End the thread. If it hangs in the device, it is left to the end of the process."""
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
        else:
            # Copies are due that may not start yet.
            self._stopping.wait(_TICK_S)

    def _linger(self) -> None:
        left_s = self._transfers.left_s
        self._doze.rest(min(LINGER_S, left_s) if left_s else LINGER_S, self._pressed)

    def _called(self) -> bool:
        return self._transfers.pending or self._stopping.is_set()

    def _pressed(self) -> bool:
        """Return whether work must be done at once, because somebody waits or soon will."""
        hurried = self._hurried_until and time.monotonic() < self._hurried_until
        return bool(hurried or self._transfers.waiting or not self._ring.roomy or self._stopping.is_set())
