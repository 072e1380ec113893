"""Backwards in two parts, as zero-bubble pipelines run them: first the gradients of inputs, later those of weights.

The second part begins at the products themselves, which hands them their dY once more, and nothing in it says which
micro-batch it belongs to. Who runs the parts says so here. Not per thread: autograd's own threads run hooks, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

__all__ = ["inputs_only", "only_inputs", "weights_of", "weights_only"]

_inputs = False
_weights: Optional[int] = None


def only_inputs() -> bool:
    """Whether the backward under way leaves the gradients of weights to a later one."""
    return _inputs


def weights_of() -> Optional[int]:
    """The micro-batch whose weights the backward under way computes the gradients of; None in any other backward."""
    return _weights


@contextmanager
def inputs_only() -> Iterator[None]:
    """Around the first part."""
    global _inputs
    _inputs = True
    try:
        yield
    finally:
        _inputs = False


@contextmanager
def weights_only(micro_batch: int) -> Iterator[None]:
    """Around the second part."""
    global _weights
    _weights = micro_batch
    try:
        yield
    finally:
        _weights = None
