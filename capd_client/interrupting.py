"""Signals whose handlers, of the job, run while capd's code does: what such a handler captures, and what it raises.

Captures of a handler that interrupted its own thread inside of the books are drops, counted right after. What it
raises, a time limit (`signal.alarm`) or an order to leave, must reach the job wherever it meets the training thread.
"""

from __future__ import annotations

import math
import signal
from functools import partial
from types import CodeType
from typing import Any, Optional

import torch

from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.errors import ConfigError
from capd_client.key import Key, Moment
from capd_client.notices import Notices
from capd_client.slicing import Slice
from capd_client.tensors import PLAIN_TYPES

__all__ = ["Interrupting", "is_interruption", "numel_of"]


class Interrupting:
    """Refuses what `Books.inside` says cannot be taken: slots and counters are half changed under the handler."""

    def __init__(self, books: Books, notices: Notices) -> None:
        self._books = books
        self._notices = notices

    def refuse(
        self,
        tensor: torch.Tensor,
        key: Key,
        moment: Moment,
        cast_to: Optional[torch.dtype],
        attributes: Optional[dict[str, Any]],
        take: Optional[Slice],
    ) -> None:
        """Have the capture counted as `internal`; arguments as for `Session.offer`. The tensor is not held."""
        dtype = tensor.dtype if cast_to is None else cast_to
        numel = numel_of(tensor, take)

        def count() -> None:
            try:
                definition = self._books.define(key, dtype, attributes)
            except ConfigError:
                self._books.refuse(None, DropReason.INVALID_KEY)
                return
            nbytes = numel * definition.item_nbytes
            self._books.refuse(definition, DropReason.INTERNAL, nbytes, moment.iteration)

        self._books.later(count)
        self._notices.warn(
            "interrupting",
            "a capture in a signal handler is dropped: the signal came in the middle of another one",
        )


def numel_of(tensor: torch.Tensor, take: Optional[Slice]) -> int:
    """Elements of what would be recorded; 0 where they are known only once the tensor is unwrapped."""
    if type(tensor) not in PLAIN_TYPES:
        return 0
    return tensor.numel() if take is None else math.prod(take.shape_of(tensor.shape))


def is_interruption(error: BaseException) -> bool:
    """Whether a signal handler that is installed now raised `error`, itself or in what it called. Ctrl-C is one.

    Handlers are recognised by their frame in the traceback.
    """
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
