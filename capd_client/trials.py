"""Forwards that a framework runs to see what comes out of them, and that train nothing: nothing of them is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

__all__ = ["trial", "trying"]

# The threads that are in one, once for each. A thread-local costs several times as much to look at, in every forward.
_trying: list[int] = []


def trying() -> bool:
    """Whether this thread is in such a forward, or its backward."""
    return bool(_trying) and get_ident() in _trying


@contextmanager
def trial() -> Iterator[None]:
    """Around such a forward."""
    thread = get_ident()
    _trying.append(thread)
    try:
        yield
    finally:
        _trying.remove(thread)
