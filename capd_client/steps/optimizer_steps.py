"""Tells whoever listens that an optimizer has stepped, or that a gradient scaler skipped its step.

To the job, a step that is skipped because a gradient overflowed is a step: its own counters, and those of every
framework, move on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Optional

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from capd_client.process.dynamo import untraced

__all__ = ["count", "forget", "listen"]

_lock = threading.RLock()  # re-entrant: a signal handler of the job may watch, too
_listeners: list[Callable[[], None]] = []
_handle: Optional[RemovableHandle] = None
_steps = 0
_original: Callable[..., Any] = GradScaler.step  # what ours calls; never cleared, calls may be under way
_patched = False


def listen(listener: Callable[[], None]) -> None:
    """Call `listener`, which must not raise, after every optimizer step. The first one installs torch's hook."""
    global _handle, _original, _patched
    with _lock:
        _listeners.append(listener)
        if _handle is None:
            _handle = register_optimizer_step_post_hook(_stepped)
        if not _patched:
            _original, _patched = GradScaler.step, True
            GradScaler.step = _scaler_step  # type: ignore[method-assign]  # meant


def forget(listener: Callable[[], None]) -> None:
    """Undo `listen`; the last one leaves torch as it was.

    Where someone patched the scaler after us, ours stays below theirs and passes everything through.
    """
    global _handle, _patched
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if _listeners or _handle is None:
            return
        _handle.remove()
        _handle = None
        if GradScaler.step is _scaler_step:
            GradScaler.step, _patched = _original, False  # type: ignore[method-assign]


def count() -> int:
    """The optimizer steps so far, of those that somebody listened to."""
    return _steps


@untraced  # compiled optimizers trace hooks
def _stepped(*_: Any) -> None:
    global _steps
    _steps += 1
    for listener in tuple(_listeners):
        listener()


def _scaler_step(*args: Any, **kwargs: Any) -> Any:
    before = _steps
    result = _original(*args, **kwargs)
    if _steps == before and _listeners:
        _stepped()
    return result
