"""Split backwards, as zero-bubble pipelines run them: first the gradients of inputs, later the gradients of weights.

The second part begins at the products themselves, so they get their dY a second time. Nothing in this part names its
micro-batch. So the adapter that runs the parts names it here. The state is not per thread, because autograd's own
threads also run hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

__all__ = ["inputs_only", "only_inputs", "weights_of", "weights_only"]

_inputs = False
_weights: Optional[int] = None


def only_inputs() -> bool:
    """Return whether the backward under way leaves the gradients of weights to a later backward."""
    return _inputs


def weights_of() -> Optional[int]:
    """Return the micro-batch of a backward that computes only gradients of weights; None in any other backward."""
    return _weights


@contextmanager
def inputs_only() -> Iterator[None]:
    """Mark the first part: a context manager around it."""
    global _inputs
    _inputs = True
    try:
        yield
    finally:
        _inputs = False


@contextmanager
def weights_only(micro_batch: int) -> Iterator[None]:
    """Mark the second part: a context manager around it."""
    global _weights
    _weights = micro_batch
    try:
        yield
    finally:
        _weights = None
