"""Reentrant activation checkpointing: carries the moments of a segment's first pass to its recompute.

`torch.utils.checkpoint(use_reentrant=True)` runs a segment under no_grad, drops its graph, and runs it again
inside the backward. Gradient hooks can only be hung in that second pass, but belong to the micro-batch of the
first. Every segment therefore keeps, per tap, a queue of the moments of its first pass. The queue is bound to
the segment and not to the module: whatever order a schedule runs its backwards in, and however often a
module is called, the second pass finds its own moments and nobody else's.

The non-reentrant kind needs none of this: its first pass keeps the graph, and the hooks with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch.utils.checkpoint import CheckpointFunction

from capd_client.key import Moment

__all__ = ["Segment", "in_backward", "install", "keep", "take", "uninstall"]


class _Local(threading.local):
    segment: Optional[Segment] = None


_local = _Local()
_lock = threading.Lock()
_users = 0
_installed = False
_original: Callable[..., Any] = (
    CheckpointFunction.forward
)  # what ours calls; never cleared, calls may be under way


def in_backward() -> bool:
    """Whether autograd is running on this thread; in a forward that means: this is a recompute."""
    return torch._C._current_graph_task_id() != -1


class Segment:
    """The function of one checkpointed segment, called once in the forward and once in the backward."""

    __slots__ = ("_function", "_moments", "_recomputes", "_source")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._moments: dict[object, deque[Moment]] = {}
        self._recomputes = False
        self._source: Optional[Segment] = (
            None  # None: its own queues (a reference to itself would be a cycle)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer = _local.segment
        _local.segment = self._enter(outer)
        try:
            return self._function(*args, **kwargs)
        finally:
            _local.segment = outer

    def _enter(self, outer: Optional[Segment]) -> Segment:
        """The segment whose queues the pass about to start uses."""
        if self._recomputes:
            self._source = None
            return self
        self._recomputes = True
        if outer is None:
            return self
        if not in_backward():
            # Nested in the first pass of another segment: only the outer one will be recomputed.
            return outer
        self._source = outer  # first pass of a nested segment, inside the recompute of the outer one
        return self

    def keep(self, tap: object, moment: Moment) -> None:
        """Queue the moment of a call in a pass without graph."""
        self._moments.setdefault(tap, deque()).append(moment)

    def take(self, tap: object) -> Optional[Moment]:
        """The moment of the same call in the first pass, or None if that one was not captured."""
        queue = (self._source or self)._moments.get(tap)
        return queue.popleft() if queue else None


def keep(tap: object, moment: Moment) -> None:
    """Remember a call that built no graph, if it lies in a checkpointed segment."""
    if _local.segment is not None:
        _local.segment.keep(tap, moment)


def take(tap: object) -> Optional[Moment]:
    """In a recompute: the moment of the same call in the first pass; None outside reentrant segments."""
    return None if _local.segment is None else _local.segment.take(tap)


def _forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
    return _original(ctx, Segment(run_function) if _users else run_function, *args)


def install() -> None:
    """Let torch's reentrant checkpointing run its functions as Segments. Calls nest; see `uninstall`."""
    global _users, _installed, _original
    with _lock:
        _users += 1
        if not _installed:
            _original = CheckpointFunction.forward
            CheckpointFunction.forward = staticmethod(_forward)  # type: ignore[method-assign]  # meant
            _installed = True


def uninstall() -> None:
    """Undo one `install`; the last one restores torch's own function.

    Where someone patched the function after us, ours stays below theirs and passes everything through.
    """
    global _users, _installed
    with _lock:
        _users -= 1
        if _users == 0 and CheckpointFunction.forward is _forward:
            CheckpointFunction.forward = staticmethod(_original)  # type: ignore[method-assign]  # meant
            _installed = False
