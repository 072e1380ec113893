"""The end of an upload on request: nothing new is begun, and the object in hand has a moment to finish."""

from __future__ import annotations

import threading
import time

from capd.errors import StoreError

__all__ = ["Halt", "UploadStopped"]


class UploadStopped(StoreError):
    """The upload was asked to stop. What was published stays, and the next round goes on."""


class Halt:
    """The request to stop an upload. Any thread may make it."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._until = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether somebody asked."""
        return self._asked.is_set()

    def ask(self, grace_s: float) -> None:
        """Ask to stop: no object is begun from now on, and those in hand are given up after `grace_s`."""
        self._until = time.monotonic() + grace_s
        self._asked.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the request, at most `timeout_s`. Return whether there is one."""
        return self._asked.wait(timeout_s)

    def check(self) -> None:
        """Raise UploadStopped if somebody asked. Call it before each object."""
        if self._asked.is_set():
            raise UploadStopped("the upload was asked to stop", retry=True)

    def check_in_hand(self) -> None:
        """Raise UploadStopped if the time of the object in hand is over. Call it before each piece."""
        if self._asked.is_set() and time.monotonic() >= self._until:
            raise UploadStopped("the upload was asked to stop, and its object took too long", retry=True)
