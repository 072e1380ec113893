"""The exception with which a process, or a block of it, ends."""

from __future__ import annotations

import sys
from typing import Optional

__all__ = ["accident"]


def accident() -> Optional[str]:
    """Return the class name of the exception that ends this process or the calling block; None if none does.

    Python sets `sys.last_value` when it has printed the exception of the main thread, before the functions of `atexit`
    run (3.12 has `sys.last_exc` as well). An interactive interpreter goes on after that, so it does not count there.
    A `finally` block that closes capd sees the exception in `sys.exc_info()`. `sys.exit()` with 0 is no accident.
    """
    error: Optional[BaseException] = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):
        found = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        error = found if isinstance(found, BaseException) else None
    if error is None or isinstance(error, (GeneratorExit, StopIteration, StopAsyncIteration)):
        return None
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    return type(error).__name__
