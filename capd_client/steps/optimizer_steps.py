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
from capd_client.process.patching import patch

__all__ = ["count", "forget", "listen"]

# Re-entrant, because a signal handler of the job may watch a model.
_lock = threading.RLock()
_listeners: list[Callable[[], None]] = []
_handle: Optional[RemovableHandle] = None
_steps = 0
_undo: list[Callable[[], None]] = []


def listen(listener: Callable[[], None]) -> None:
    """Call `listener`, which must not raise, after every optimizer step. The first listener installs torch's hook."""
    global _handle
    with _lock:
        _listeners.append(listener)
        if _handle is None:
            _handle = register_optimizer_step_post_hook(_stepped)
            _undo.append(patch(GradScaler, "step", _around_scaler))


def forget(listener: Callable[[], None]) -> None:
    """Undo `listen`. The last call restores torch's own functions.

    If another library patched the scaler after capd, our function stays below theirs and passes all calls through.
    """
    global _handle
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)
        if _listeners or _handle is None:
            return
        _handle.remove()
        _handle = None
        _undo.pop()()


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


def _around_scaler(step: Callable[..., Any]) -> Callable[..., Any]:
    def stepping(*args: Any, **kwargs: Any) -> Any:
        before = _steps
        result = step(*args, **kwargs)
        if _steps == before and _listeners:
            _stepped()
        return result

    return stepping
