"""The accounts of one rank's captures: the lock, the counters and the ledger of drops, exact whenever the lock is free.

The lock is re-entrant, so that a signal handler cannot deadlock the thread that it interrupted. What the handler
captures where that thread is `inside` is a drop, counted `later`: until the handler returns nothing may be changed.

A handler may raise as well, and Python runs it at the begin of a function, behind a call and at the end of a loop's
turn. So everything is computed first; what must change together is changed by plain statements behind that.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch

from capd_client import emulated
from capd_client.counter_page import COUNTER_DROPS, COUNTER_OFFERED, DropReason
from capd_client.counting import REASON_INDEX, Counters, Ledger, Snapshot
from capd_client.definitions import Definition, Definitions
from capd_client.errors import Counted
from capd_client.key import Key
from capd_client.protocol import Descriptor

__all__ = ["Accounts"]


class Accounts:
    """Counts offers and drops, under `lock`. Any thread may call it."""

    def __init__(self, counters: Counters) -> None:
        self.lock = threading.RLock()
        # Whether this thread holds the lock already: then it runs a signal handler that interrupted it there.
        self.inside: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # not in its stubs
        self.counters = counters
        self.ledger = Ledger()
        self.definitions = Definitions()
        # The reason under which every offer is dropped; None: captures are taken.
        self.refusing: Optional[DropReason] = None
        self._later: deque[Callable[[], None]] = deque()
        emulated.follow(self._emulation_changed)

    def define(self, key: Key, dtype: torch.dtype, attributes: Optional[dict[str, Any]]) -> Definition:
        """The definition of what is about to be offered. Raises ConfigError for what the protocol does not carry."""
        found = self.definitions.find(key, dtype, attributes)
        if found is not None:
            return found
        with self.lock:
            return self.definitions.make(key, dtype, attributes)

    def _emulation_changed(self) -> None:
        with self.lock:
            self.definitions.found.clear()

    def refuse(
        self, definition: Optional[Definition], reason: DropReason, nbytes: int = 0, iteration: int = 0
    ) -> None:
        """Count an offer that is dropped before it was admitted. Raises Counted for a handler's error behind that."""
        if self.inside():
            self.later(partial(self.refuse, definition, reason, nbytes, iteration))
            return
        counted = False
        try:
            with self.lock:
                self._count(definition, self.refusing or reason, nbytes, iteration)
                self.counters.words[COUNTER_OFFERED] += 1
                counted = True
        except BaseException as error:
            if counted:
                raise Counted from error
            raise

    def later(self, call: Callable[[], None]) -> None:
        """In a signal handler: have this called once the interrupted thread is outside of the books."""
        self._later.append(call)

    def catch_up(self) -> None:
        """Make the calls that wait, unless this is the handler still."""
        while self._later and not self.inside():
            try:
                call = self._later.popleft()
            except IndexError:  # another thread was faster
                return
            call()

    def snapshot(self) -> Snapshot:
        """The counters; exact, because the lock is held."""
        self.catch_up()
        with self.lock:
            return self.counters.snapshot()

    # -- with the lock held ------------------------------------------------------------------------------

    def _count(
        self, definition: Optional[Definition], reason: DropReason, nbytes: int, iteration: int
    ) -> None:
        word = COUNTER_DROPS + REASON_INDEX[reason]
        if definition is not None:
            self.ledger.add(definition.id, reason, nbytes, iteration)
        self.counters.words[word] += 1

    def _count_tensor(self, definition: Definition, descriptor: Descriptor, reason: DropReason) -> None:
        """A drop has its tensor's bytes, also where only statistics would have travelled."""
        nbytes = math.prod(descriptor.shape) * definition.item_nbytes
        self._count(definition, reason, nbytes, descriptor.moment.iteration)
