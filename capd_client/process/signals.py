"""Tells what a signal handler of the job raised from errors of capd: a signal may come in while capd's code runs.

A time limit that raises (`signal.alarm`), or an order to leave, must reach the job wherever it meets the training
thread. Handlers are recognised by their frame in the traceback.
"""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType
from typing import Any, Optional

__all__ = ["is_interruption"]


def is_interruption(error: BaseException) -> bool:
    """Whether a signal handler that is installed now raised `error`, itself or in what it called. Ctrl-C is one."""
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
    """The code that runs when `handler` is called; None for signal.SIG_DFL and what is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):
        return None
    function: Any = getattr(handler, "__func__", handler)  # of a method
    code: Optional[CodeType] = getattr(function, "__code__", None)
    return code or getattr(type(function).__call__, "__code__", None)
