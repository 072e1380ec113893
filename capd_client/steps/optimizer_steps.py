"""Calls listeners when an optimizer has stepped, or when a gradient scaler has skipped its step.

A scaler skips a step after an overflow of a gradient. For the job this is a step as well: its own counters continue,
and the counters of every framework.
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

# Re-entrant, because a signal handler of the job may watch a model.
_lock = threading.RLock()
_listeners: list[Callable[[], None]] = []
_handle: Optional[RemovableHandle] = None
_steps = 0
# Called by our replacement. Never cleared, because calls may be under way.
_original: Callable[..., Any] = GradScaler.step
_patched = False


def listen(listener: Callable[[], None]) -> None:
    """Call `listener`, which must not raise, after every optimizer step. The first listener installs torch's hook."""
    global _handle, _original, _patched
    with _lock:
        _listeners.append(listener)
        if _handle is None:
            _handle = register_optimizer_step_post_hook(_stepped)
        if not _patched:
            _original, _patched = GradScaler.step, True
            GradScaler.step = _scaler_step  # type: ignore[method-assign]


def forget(listener: Callable[[], None]) -> None:
    """Undo `listen`. The last call restores torch's own functions.

    If another library patched the scaler after capd, our function stays below theirs and passes all calls through.
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
    """Return the number of optimizer steps until now, without steps that nobody listened to."""
    return _steps


# Compiled optimizers trace their hooks.
@untraced
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
