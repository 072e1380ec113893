"""Activation checkpointing: carries the moments of a segment's first pass to its recompute.

`torch.utils.checkpoint(use_reentrant=True)` runs a segment under no_grad, drops its graph, and runs it again
inside the backward. Gradient hooks can only be hung in that second pass, but belong to the micro-batch of the
first. Every segment therefore keeps, per tap, a queue of the moments of its first pass. The queue is bound to
the segment and not to the module: whatever order a schedule runs its backwards in, and however often a
module is called, the second pass finds its own moments and nobody else's.

The non-reentrant kind keeps the graph of its first pass, and the hooks with it; only what a compiled graph saved for
its backward, the moments among it, is that of the second pass. Its segments are there for those.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, GeneratorType
from typing import Any, Optional

import torch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["Segment", "in_backward", "in_segment", "install", "keep", "repeating", "take", "uninstall"]


class _Local(threading.local):
    segment: Optional[Segment] = None


_local = _Local()
_lock = threading.Lock()
_users = 0
_installed = False
_original: Callable[..., Any] = (
    CheckpointFunction.forward
)  # what ours call; never cleared, calls may be under way
_original_generator: Callable[..., Generator[None, None, None]] = (
    checkpoint._checkpoint_without_reentrant_generator
)


def in_backward() -> bool:
    """Whether autograd is running on this thread; in a forward that means: this is a recompute."""
    return torch._C._current_graph_task_id() != -1


def in_segment() -> bool:
    """Whether this thread runs a pass of a checkpointed segment: the first one is without gradients, if reentrant."""
    return _local.segment is not None


def repeating() -> bool:
    """Whether this thread runs a checkpointed segment again. A gradient hook of the job does not."""
    return in_backward() and _local.segment is not None and _local.segment.repeats


class Segment:
    """The function of one checkpointed segment, called once in the forward and once in the backward."""

    __slots__ = ("_calls", "_function", "_outer", "_passes")

    def __init__(self, function: Callable[..., Any], *, passes: int = 0) -> None:
        self._function = function
        self._calls: dict[object, deque[Any]] = {}
        self._passes = passes  # those that have begun
        self._outer: Optional[Segment] = None  # the segment around the pass under way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._pass():
            return self._function(*args, **kwargs)

    def first_pass(self, run: Generator[None, None, None]) -> Generator[None, None, None]:
        """The first pass where torch itself calls the function: `run` is what it does before and after."""
        with self._pass():
            yield from run

    @contextmanager
    def _pass(self) -> Generator[None, None, None]:
        self._outer = outer = _local.segment
        self._passes += 1
        _local.segment = self
        try:
            yield
        finally:
            _local.segment = outer
            self._outer = None

    @property
    def repeats(self) -> bool:
        """Whether the pass under way runs something again: its own first pass, or that of a segment around it."""
        return self._passes > 1 or (self._outer is not None and self._outer.repeats)

    def keep(self, tap: object, call: Any) -> None:
        """Queue a call in the first pass, also for segments around it, which run it again, too."""
        if self._passes > 1:
            return
        self._calls.setdefault(tap, deque()).append(call)
        if self._outer is not None and not in_backward():
            self._outer.keep(tap, call)

    def take(self, tap: object) -> Optional[Any]:
        """What was kept of the same call in the first pass, or None if that one was not captured.

        A segment whose first pass lies in the recompute of another one takes what that has kept.
        """
        if self._passes == 1:
            return None if self._outer is None else self._outer.take(tap)
        queue = self._calls.get(tap)
        return queue.popleft() if queue else None


def keep(tap: object, call: Any) -> None:
    """Remember a call whose second pass will ask for its moment, if it lies in a checkpointed segment."""
    if _local.segment is not None:
        _local.segment.keep(tap, call)


def take(tap: object) -> Optional[Any]:
    """In a recompute: what the same call kept in the first pass; None where it kept nothing."""
    return None if _local.segment is None else _local.segment.take(tap)


def _forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
    return _original(ctx, Segment(run_function) if _users else run_function, *args)


def _generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
    if not _users:
        return _original_generator(fn, *args, **kwargs)
    segment = Segment(fn)
    return segment.first_pass(_original_generator(segment, *args, **kwargs))


def install() -> None:
    """Let torch's checkpointing run its functions as Segments. Calls nest; see `uninstall`."""
    global _users, _installed, _original, _original_generator
    with _lock:
        _users += 1
        if not _installed:
            _original = CheckpointFunction.forward
            CheckpointFunction.forward = staticmethod(_forward)  # type: ignore[method-assign]  # meant
            _original_generator = checkpoint._checkpoint_without_reentrant_generator
            checkpoint._checkpoint_without_reentrant_generator = _generator
            _installed = True
            _adopt()


def _adopt() -> None:
    """Make Segments of those whose first pass this thread is in: the first capture of a process may lie there.

    torch's own frames hold what it will call in the backward.
    """
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(checkpoint):
            held = frame.f_locals
            if frame.f_code.co_name == "forward" and hasattr(held.get("ctx"), "run_function"):
                held["ctx"].run_function = Segment(held["ctx"].run_function, passes=1)
            for value in tuple(held.values()):
                if isinstance(value, GeneratorType) and value.gi_frame is not None:
                    _adopt_frame(value.gi_frame.f_locals.get("new_frame"))
        frame = frame.f_back


def _adopt_frame(frame: Any) -> None:
    if hasattr(frame, "recompute_fn"):
        frame.recompute_fn = Segment(frame.recompute_fn, passes=1)


def uninstall() -> None:
    """Undo one `install`; the last one restores torch's own functions.

    Where someone patched them after us, ours stay below theirs and pass everything through.
    """
    global _users, _installed
    with _lock:
        _users -= 1
        if _users:
            return
        ours = (CheckpointFunction.forward, checkpoint._checkpoint_without_reentrant_generator)
        if ours == (_forward, _generator):
            CheckpointFunction.forward = staticmethod(_original)  # type: ignore[method-assign]  # meant
            checkpoint._checkpoint_without_reentrant_generator = _original_generator
            _installed = False
