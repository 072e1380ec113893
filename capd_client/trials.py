"""Forwards that a framework runs to see what comes out of them, and that train nothing: nothing of them is captured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["trial", "trying"]


class _Local(threading.local):
    depth = 0


_local = _Local()


def trying() -> bool:
    """Whether this thread is in such a forward, or its backward."""
    return _local.depth > 0


@contextmanager
def trial() -> Iterator[None]:
    """Around such a forward."""
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1
