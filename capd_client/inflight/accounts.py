"""The accounts of one rank's captures: the lock, the counters and the ledger of drops, exact whenever the lock is free.

The lock is re-entrant, so that a signal handler cannot deadlock the thread that it interrupted. If that thread is
`inside`, slots and counters may be half changed. A capture of the handler is then dropped.
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


class Accounts:
    """The counts of offers and drops, guarded by `lock`. Any thread may call the methods.

    Args:
        counters: The words to count in.
        lock: Guards everything that is counted. None makes a lock.
        interned: Called with every new definition.
    """

    def __init__(
        self,
        counters: Counters,
        lock: Optional[threading.RLock] = None,
        interned: Callable[[Define], None] = lambda _: None,
    ) -> None:
        self.lock = lock or threading.RLock()
        # Whether this thread holds the lock already. If so, it runs a signal handler that interrupted it there.
        # The stubs of RLock lack the method.
        self.inside: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]
        self.counters = counters
        self.ledger = Ledger()
        self.definitions = Definitions(interned)
        # The reason for which every offer is dropped. None: captures are taken.
        self.refusing: Optional[DropReason] = None
        emulation_label.follow(self._emulation_changed)

    def define(self, key: Key, dtype: torch.dtype, attributes: Optional[dict[str, Any]]) -> Definition:
        """Return the definition of a tensor that is about to be offered.

        Raises:
            ConfigError: The protocol cannot carry the key or the attributes.
        """
        found = self.definitions.find(key, dtype, attributes)
        if found is not None:
            return found
        with self.lock:
            return self.definitions.make(key, dtype, attributes)

    def _emulation_changed(self) -> None:
        with self.lock:
            self.definitions.found.clear()

    def refuse(self, refused: Refused) -> None:
        """Count an offer that is dropped before it is admitted."""
        with self.lock:
            reason = self.refusing or refused.reason
            self.count(refused.definition, reason, refused.nbytes, refused.iteration)
            self.counters.words[COUNTER_OFFERED] += 1
            # Directly after the count, because no signal handler runs between two plain statements.
            refused.counted = True

    def refuse_inside(self, reason: DropReason) -> None:
        """Count the capture of a signal handler that runs `inside`.

        The capture is counted without its key, because the ledger may be half changed.
        """
        words = self.counters.words
        words[COUNTER_DROPS + REASON_INDEX[reason]] += 1
        words[COUNTER_OFFERED] += 1

    def snapshot(self) -> CounterValues:
        """Return the counters at one instant. They are exact, because the lock is held."""
        with self.lock:
            return self.counters.snapshot()

    def count(
        self, definition: Optional[Definition], reason: DropReason, nbytes: int, iteration: int
    ) -> None:
        """Count a drop. The caller holds the lock."""
        word = COUNTER_DROPS + REASON_INDEX[reason]
        if definition is not None:
            self.ledger.add(definition.id, reason, nbytes, iteration)
        self.counters.words[word] += 1


def reason_of(error: BaseException) -> DropReason:
    """Return the drop reason of a capture that `error` ended: INTERRUPTED for a job's signal handler, else INTERNAL."""
    return DropReason.INTERRUPTED if is_interruption(error) else DropReason.INTERNAL
