"""Where Megatron's schedules are: the micro-batch of every forward, the iteration, and whether they evaluate.

All of them, pipelined or not, ask `check_first_val_step` and call `set_current_microbatch` before the forward of a
micro-batch, and look both up in their module then. So it is no matter who has fetched the schedule itself, or when.

The iteration is that of Megatron's training loop where the job runs it. Without it an iteration is over when an
optimizer has stepped, or when a chunk begins a micro-batch again that it had already: after a step that was skipped.

Nothing tells of a schedule's end: whether a forward is one of it is seen by the frames that called it.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any, Optional

from torch import nn

from capd_client.steps import optimizer_steps
from capd_client.steps.clock import begin_counted, end_counted, evaluate, iteration_over

__all__ = ["MODULE", "adopt", "ask", "begin", "end", "models_under_way", "schedule"]

MODULE = "megatron.core.pipeline_parallel.schedules"
_SCHEDULES = "forward_backward_"  # how the names of all of them begin
_LOOP = "megatron.training.global_vars"


class _Schedule:
    """The micro-batch that this process is in; a counter (capd_client.steps.clock.begin_counted)."""

    def __init__(self) -> None:
        self._micro_batch = 0
        self._reached: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._steps = -1  # of optimizers, when these began
        self._forward_only = False
        self.counts = False  # until the forward of a root that is none of a schedule

    def __call__(self) -> tuple[Optional[int], int]:
        return _iteration(), self._micro_batch

    def ask(self, first_val_step: Any, forward_only: bool, condition: Any) -> None:
        """The next micro-batch trains, or is forward only."""
        self._forward_only = bool(forward_only)

    def begin(self, model: nn.Module, micro_batch: int) -> None:
        """The forward of a chunk begins."""
        evaluate(self._evaluates)
        if self._forward_only:
            return
        if self._steps != optimizer_steps.count():
            self._steps = optimizer_steps.count()
            self._reached.clear()
        if self._reached.get(model, -1) >= micro_batch:
            self._reached.clear()
            if _iteration() is None:
                iteration_over()
        self._reached[model] = micro_batch
        self._micro_batch = micro_batch
        self.counts = True
        begin_counted(self)

    def _evaluates(self) -> bool:
        return self._forward_only and _frame(_SCHEDULES) is not None

    def look(self) -> None:
        """The forward of a root begins while this counts: after the schedule it is the job's own."""
        if _frame(_SCHEDULES) is None:
            self._stop()

    def end(self) -> None:
        """Nobody listens any more."""
        self._reached.clear()
        self._forward_only = False
        self._stop()

    def _stop(self) -> None:
        self.counts = False
        end_counted(self)


schedule = _Schedule()
ask, begin, end = schedule.ask, schedule.begin, schedule.end


def _iteration() -> Optional[int]:
    """Steps finished before, as Megatron's loop counts them; None where the job has a loop of its own."""
    args = getattr(sys.modules.get(_LOOP), "_GLOBAL_ARGS", None)
    number = getattr(args, "curr_iteration", None)
    return number if type(number) is int else None


def adopt() -> None:
    """Begin the micro-batch whose forward this thread is in already."""
    frame = _frame("forward_step")
    if frame is not None and frame.f_locals.get("current_microbatch") is not None:
        begin(frame.f_locals["model"], frame.f_locals["current_microbatch"])


def models_under_way() -> list[nn.Module]:
    """The chunks that the schedule which this thread is in runs; none where it is in none."""
    frame = _frame(_SCHEDULES)
    if frame is None:
        return []
    held = frame.f_locals
    models: Any = held.get("model")
    if isinstance(held, dict):
        held.clear()  # before Python 3.13 it keeps the frame's tensors alive until the schedule ends
    return models if isinstance(models, list) else [models]


def _frame(name: str) -> Optional[FrameType]:
    """The innermost frame of a function of the schedules whose name begins so."""
    schedules = vars(sys.modules[MODULE]) if MODULE in sys.modules else None
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and not (frame.f_globals is schedules and frame.f_code.co_name.startswith(name)):
        frame = frame.f_back
    return frame
