"""Activation checkpointing: carries the moments of a segment's first pass to its recompute.

`torch.utils.checkpoint(use_reentrant=True)` runs a segment under no_grad, drops its graph, and runs it again
inside the backward. Gradient hooks can only be added in that second pass, but belong to the micro-batch of the
first pass. So every segment keeps, per tap, a queue of the moments of its first pass. The queue belongs to the
segment, not to the module. So the second pass finds exactly its own moments. This is true for any order of backwards,
and for modules that are called several times.

Megatron's own checkpointing is of this kind as well, for whole layers and for functions whose output it discards.

The non-reentrant kind keeps the graph of its first pass with its hooks. But a compiled graph recomputes the values
that it saved for its backward, and the moments are among them. Segments of this kind exist for these moments.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, GeneratorType, ModuleType
from typing import Any, Optional

import torch
import torch.utils.checkpoint

from capd_client.process.patching import patch

__all__ = [
    "Segment",
    "carry",
    "in_backward",
    "in_segment",
    "install",
    "keep",
    "repeating",
    "take",
    "uninstall",
]


class _SegmentOfThread(threading.local):
    segment: Optional[Segment] = None


_local = _SegmentOfThread()
_lock = threading.Lock()
# Returns -1 outside of a backward.
_graph_task = torch._C._current_graph_task_id
_users = 0
# Undoes each patch, by its entry of _TARGETS.
_undo: dict[tuple[Any, ...], Callable[[], None]] = {}
_carriers: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []


def in_backward() -> bool:
    """Return whether autograd runs on this thread. In a forward, this means a recompute."""
    return _graph_task() != -1


def in_segment() -> bool:
    """Return whether this thread runs a pass of a checkpointed segment. A reentrant first pass has no gradients."""
    return _local.segment is not None


def repeating() -> bool:
    """Return whether this thread runs a checkpointed segment again. This is not so in a gradient hook of the job."""
    return in_backward() and _local.segment is not None and _local.segment.repeats


class Segment:
    """The function of one checkpointed segment, called once in the forward and once in the backward."""

    __slots__ = ("_calls", "_function", "_outer", "_passes")

    def __init__(self, function: Callable[..., Any], *, passes: int = 0) -> None:
        for carrier in _carriers:
            function = carrier(function)
        self._function = function
        self._calls: dict[object, deque[Any]] = {}
        # The passes that have begun.
        self._passes = passes
        # The segment around the pass under way.
        self._outer: Optional[Segment] = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._pass():
            return self._function(*args, **kwargs)

    def first_pass(self, run: Generator[None, None, None]) -> Generator[None, None, None]:
        """Run the first pass of a function that torch itself calls. `run` is torch's work before and after the call."""
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
        """Whether the pass under way repeats its own first pass, or the first pass of a segment around it."""
        return self._passes > 1 or (self._outer is not None and self._outer.repeats)

    def keep(self, tap: object, call: Any) -> None:
        """Queue a call of the first pass, also in the segments around this one, which repeat the call as well."""
        if self._passes > 1:
            return
        self._calls.setdefault(tap, deque()).append(call)
        if self._outer is not None and not in_backward():
            self._outer.keep(tap, call)

    def take(self, tap: object) -> Optional[Any]:
        """Return the value that the same call kept in the first pass, or None if that call was not captured.

        The first pass of a segment may be part of another segment's recompute. It then takes values of that segment.
        """
        if self._passes == 1:
            return None if self._outer is None else self._outer.take(tap)
        queue = self._calls.get(tap)
        return queue.popleft() if queue else None


def keep(tap: object, call: Any) -> None:
    """Remember a call in a checkpointed segment, whose second pass will ask for the moment."""
    if _local.segment is not None:
        _local.segment.keep(tap, call)


def take(tap: object) -> Optional[Any]:
    """Return, in a recompute, the value that the same call kept in the first pass; None if it kept nothing."""
    return None if _local.segment is None else _local.segment.take(tap)


def carry(carrier: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the function of every segment by `carrier(function)`.

    The second pass of a segment is outside of all forwards. A carrier runs when a segment begins, and brings along the
    values that the second pass needs.

    Args:
        carrier: Makes the replacement of a segment's function.

    Returns:
        A function that undoes the call.
    """
    install()
    _carriers.append(carrier)

    def undo() -> None:
        _carriers.remove(carrier)
        uninstall()

    return undo


_Function = Callable[..., Any]


def _around_method(original: _Function) -> _Function:
    """Return the replacement of a method with the arguments (holder, function of the segment, ...)."""

    def run(holder: Any, function: _Function, *args: Any, **kwargs: Any) -> Any:
        return original(holder, Segment(function) if _is_new(function) else function, *args, **kwargs)

    return run


def _around_generator(original: _Function) -> _Function:
    """Return the replacement of torch's non-reentrant generator, in which torch runs the first pass."""

    def generate(function: _Function, *args: Any, **kwargs: Any) -> Any:
        if not _is_new(function):
            return original(function, *args, **kwargs)
        segment = Segment(function)
        run: Generator[None, None, None] = original(segment, *args, **kwargs)
        return segment.first_pass(run)

    return generate


def _is_new(function: _Function) -> bool:
    """Return whether the function becomes a Segment. A patch of another library may lie between two of capd's."""
    return _users > 0 and not isinstance(function, Segment)


_TARGETS: tuple[tuple[Callable[[_Function], _Function], str, str, str], ...] = (
    (_around_method, "torch.utils.checkpoint", "CheckpointFunction", "forward"),
    (_around_generator, "torch.utils.checkpoint", "", "_checkpoint_without_reentrant_generator"),
    (_around_method, "megatron.core.tensor_parallel.random", "CheckpointFunction", "forward"),
    (_around_method, "megatron.core.tensor_parallel.random", "CheckpointWithoutOutput", "checkpoint"),
)


def install() -> None:
    """Let the activation checkpointing of the loaded libraries run Segments. Calls nest; see `uninstall`."""
    global _users
    with _lock:
        _users += 1
        for target in _TARGETS:
            around, module, holder, name = target
            if target not in _undo and module in sys.modules:
                library = sys.modules[module]
                _undo[target] = patch(getattr(library, holder) if holder else library, name, around)
                _adopt(library)


def _adopt(library: ModuleType) -> None:
    """Make Segments of the functions whose first pass runs on this thread. The first capture may happen in such a pass.

    The library's own frames hold the functions that it will call in the backward.
    """
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        if frame.f_globals is vars(library):
            held = frame.f_locals
            for owner in (held.get("ctx"), held.get("self")):
                _adopt_function(owner, "run_function")
            for value in tuple(held.values()):
                if isinstance(value, GeneratorType) and value.gi_frame is not None:
                    _adopt_function(value.gi_frame.f_locals.get("new_frame"), "recompute_fn")
        frame = frame.f_back


def _adopt_function(owner: Any, name: str) -> None:
    function = getattr(owner, name, None)
    if function is not None and not isinstance(function, Segment):
        setattr(owner, name, Segment(function, passes=1))


def uninstall() -> None:
    """Undo one `install`. The last call restores the libraries' own functions."""
    global _users
    with _lock:
        _users -= 1
        while _undo and not _users:
            _undo.popitem()[1]()
