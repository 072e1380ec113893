"""The accounts of one rank's captures: the lock, the counters and the ledger of drops, exact whenever the lock is free.

The lock is re-entrant, so that a signal handler cannot deadlock the thread that it interrupted. What the handler
captures while that thread is `inside` is a drop: slots and counters are half changed under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Optional

import torch

from capd_client.inflight.capture import Refused
from capd_client.inflight.counters import REASON_INDEX, Counters, CounterValues, Ledger
from capd_client.inflight.definitions import Definition, Definitions
from capd_client.process.signals import is_interruption
from capd_client.protocol.counter_page import COUNTER_DROPS, COUNTER_OFFERED, DropReason
from capd_client.protocol.key import Key
from capd_client.protocol.messages import Define
from capd_client.tensors import emulation_label

__all__ = ["Accounts", "reason_of"]


def _nobody(_: Define) -> None:
    pass


class Accounts:
    """Counts offers and drops, under `lock`. Any thread may call it.

    Args:
        counters: The words that are counted in.
        lock: Of everything that is counted; None makes one.
        interned: Called with every new definition.
    """

    def __init__(
        self,
        counters: Counters,
        lock: Optional[threading.RLock] = None,
        interned: Callable[[Define], None] = _nobody,
    ) -> None:
        self.lock = lock or threading.RLock()
        # Whether this thread holds the lock already: then it runs a signal handler that interrupted it there.
        self.inside: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # not in its stubs
        self.counters = counters
        self.ledger = Ledger()
        self.definitions = Definitions(interned)
        # The reason under which every offer is dropped; None: captures are taken.
        self.refusing: Optional[DropReason] = None
        emulation_label.follow(self._emulation_changed)

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

    def refuse(self, refused: Refused) -> None:
        """Count an offer that is dropped before it was admitted."""
        with self.lock:
            reason = self.refusing or refused.reason
            self.count(refused.definition, reason, refused.nbytes, refused.iteration)
            self.counters.words[COUNTER_OFFERED] += 1
            refused.counted = True  # beside the count: no signal handler runs between two plain statements

    def refuse_inside(self, reason: DropReason) -> None:
        """Count the capture of a signal handler that runs `inside`, without its key: the ledger may be half changed."""
        words = self.counters.words
        words[COUNTER_DROPS + REASON_INDEX[reason]] += 1
        words[COUNTER_OFFERED] += 1

    def snapshot(self) -> CounterValues:
        """The counters; exact, because the lock is held."""
        with self.lock:
            return self.counters.snapshot()

    def count(
        self, definition: Optional[Definition], reason: DropReason, nbytes: int, iteration: int
    ) -> None:
        """Count a drop. With the lock held."""
        word = COUNTER_DROPS + REASON_INDEX[reason]
        if definition is not None:
            self.ledger.add(definition.id, reason, nbytes, iteration)
        self.counters.words[word] += 1


def reason_of(error: BaseException) -> DropReason:
    """The reason of a capture that `error` broke off: an error of capd's own, or one of the job's signal handlers."""
    return DropReason.INTERRUPTED if is_interruption(error) else DropReason.INTERNAL
