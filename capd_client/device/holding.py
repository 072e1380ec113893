"""Which tensors are held until they are copied instead of a snapshot, without anybody having declared them immutable.

In a training forward autograd keeps the operands and results of most products for the backward. Until then they do
not change, so a copy of them on the device is not needed. Nothing promises that: each is checked by its version counter
and its address when its copy is done. One that changed is a drop, and its module, whatever its layer, is copied from
then on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch

from capd_client.protocol.key import Key

__all__ = ["MAX_HELD_NBYTES", "MIN_HELD_NBYTES", "Holding"]

MAX_HELD_NBYTES = 1 << 30  # at once, on one device
# A held tensor shares its copy to the host with no other: for a smaller one that call costs more than the copy on the
# device does.
MIN_HELD_NBYTES = 4 << 20
_KEPT = frozenset({"input", "output", "query", "key", "value"})
_NUMBER = re.compile(r"\d+")


class Holding:
    """Tensors that are held, up to `max_nbytes` at once; 0: none are."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._held_nbytes = 0
        self._lock = threading.RLock()
        # Whether this thread is inside: see `Queue.inside`.
        self.inside: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]  # not in its stubs
        self._changed: set[tuple[str, str]] = set()

    def wants(self, key: Key, nbytes: int) -> bool:
        """Whether a tensor of `nbytes` that is captured now is to be held."""
        if nbytes < MIN_HELD_NBYTES or self._held_nbytes + nbytes > self._max_nbytes:
            return False
        if key.tensor_name not in _KEPT or key.operation != "forward" or not key.module:
            return False
        return torch.is_grad_enabled() and not (self._changed and _place(key) in self._changed)

    def add(self, nbytes: int) -> None:
        """So many bytes are held now."""
        with self._lock:
            self._held_nbytes += nbytes

    def give(self, nbytes: int) -> None:
        """So many bytes are not held any more."""
        with self._lock:
            self._held_nbytes -= nbytes

    def clear(self) -> None:
        """Nothing is held any more, whatever the counts say: the device has failed."""
        with self._lock:
            self._held_nbytes = 0

    def changed(self, key: Key) -> None:
        """A held tensor was written to: those of its module are not held again."""
        self._changed.add(_place(key))


def _place(key: Key) -> tuple[str, str]:
    """The module without its layer's number, and the tensor."""
    return _NUMBER.sub("*", key.module), key.tensor_name
