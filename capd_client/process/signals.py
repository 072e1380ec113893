"""Distinguishes errors of capd from exceptions of the job's signal handlers, which can run during capd's code.

A time limit that raises (`signal.alarm`), or an order to exit, must reach the job even if it interrupts capd. A handler
is recognised by its frame in the traceback.
"""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType
from typing import Any, Optional

__all__ = ["is_interruption"]


def is_interruption(error: BaseException) -> bool:
    """Whether a signal handler that is installed now raised `error`, directly or in a call. Ctrl-C counts."""
    if not isinstance(error, Exception):
        return True
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: Any) -> Optional[CodeType]:
    """Return the code that runs when `handler` is called; None for signal.SIG_DFL and functions not in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):
        return None
    # A method has its function's code.
    function: Any = getattr(handler, "__func__", handler)
    code: Optional[CodeType] = getattr(function, "__code__", None)
    return code or getattr(type(function).__call__, "__code__", None)
