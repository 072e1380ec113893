"""Signals within a block: handled by a function, put off to its end, or a way to leave it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

__all__ = ["leaving_on_signals", "signals_handled", "signals_put_off"]

Handler = Callable[[int, FrameType | None], None]


def leaving_on_signals() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end this command as Ctrl-C does inside the context, so that it cleans up."""
    return signals_handled(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), _leave))


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_handled(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handle signals by these functions within the block, except signals that are ignored (nohup)."""
    heard = {number: one for number, one in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, one) for number, one in heard.items()}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


@contextlib.contextmanager
def signals_put_off(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Deliver these signals after the block. Only the main thread may call this."""
    came: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    try:
        with signals_handled(dict.fromkeys(numbers, remember)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)
