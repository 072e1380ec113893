"""The tensors that are held until they are copied, instead of a snapshot, although nobody declared them immutable.

In a training forward, autograd keeps the operands and results of most products for the backward. They do not change
until then, so a copy on the device is not needed. Nothing guarantees this. Each tensor is therefore checked by its
version counter and its address when its copy is done. A tensor that changed is a drop. From then on its module, in
every layer, is copied.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch

from capd_client.protocol.key import Key

__all__ = ["MAX_HELD_NBYTES", "MIN_HELD_NBYTES", "Holding"]

# At once, on one device.
MAX_HELD_NBYTES = 1 << 30
# A held tensor needs its own copy to the host. For a smaller tensor, this call costs more than a copy on the device.
MIN_HELD_NBYTES = 4 << 20
_KEPT = frozenset({"input", "output", "query", "key", "value"})
_NUMBER = re.compile(r"\d+")


class Holding:
    """The tensors that are held on one device, at most `max_nbytes` at once; 0: none."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._held_nbytes = 0
        self._lock = threading.RLock()
        # Returns whether this thread is inside: see `Accounts.inside`.
        self.inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # not in its stubs
        self._changed: set[tuple[str, str]] = set()

    def wants(self, key: Key, nbytes: int) -> bool:
        """Return whether to hold a tensor of `nbytes` that is captured now."""
        if nbytes < MIN_HELD_NBYTES or self._held_nbytes + nbytes > self._max_nbytes:
            return False
        if key.tensor_name not in _KEPT or key.operation != "forward" or not key.module:
            return False
        return torch.is_grad_enabled() and not (self._changed and _place(key) in self._changed)

    def add(self, nbytes: int) -> None:
        """Count `nbytes` as held."""
        with self._lock:
            self._held_nbytes += nbytes

    def give(self, nbytes: int) -> None:
        """Count `nbytes` as no longer held."""
        with self._lock:
            self._held_nbytes -= nbytes

    def clear(self) -> None:
        """Reset the count, because the device has failed and holds nothing."""
        with self._lock:
            self._held_nbytes = 0

    def changed(self, key: Key) -> None:
        """Note that a held tensor was written to. Tensors of its module are not held again."""
        self._changed.add(_place(key))


def _place(key: Key) -> tuple[str, str]:
    """Return the module without its layer's number, and the tensor."""
    return _NUMBER.sub("*", key.module), key.tensor_name
