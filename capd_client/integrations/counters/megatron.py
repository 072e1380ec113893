"""The counter of Megatron's schedules: the micro-batch of every forward, the iteration, and whether they evaluate.

All schedules, pipelined or not, call `check_first_val_step` and `set_current_microbatch` before the forward of a
micro-batch. They look both functions up in their module at that time. So it does not matter who holds a reference
to the schedule itself, or since when.

If the job runs Megatron's training loop, the iteration is the loop's. Otherwise an iteration ends when an optimizer
steps. After a skipped step it ends when a chunk begins a micro-batch that it has already run.

Nothing reports the end of a schedule. The frames that called a forward show whether it belongs to one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Optional

from torch import nn

from capd_client.integrations.framework_scalars import megatron_losses
from capd_client.steps import optimizer_steps
from capd_client.steps.clock import begin_counted, end_counted, evaluate, iteration_over

__all__ = ["MODULE", "adopt", "ask", "begin", "end", "losses", "models_under_way", "schedule"]

MODULE = "megatron.core.pipeline_parallel.schedules"
# The common prefix of the names of all schedules.
_SCHEDULES = "forward_backward_"
_LOOP = "megatron.training.global_vars"


class _Schedule:
    """The micro-batch that this process is in. An instance is a counter (capd_client.steps.clock.begin_counted)."""

    def __init__(self) -> None:
        self._micro_batch = 0
        self._reached: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        # The number of optimizer steps when the chunks in `_reached` began.
        self._steps = -1
        self._forward_only = False
        # True until a forward of a root that belongs to no schedule.
        self.counts = False

    def __call__(self) -> tuple[Optional[int], int]:
        return _iteration(), self._micro_batch

    def ask(self, first_val_step: Any, forward_only: bool, condition: Any) -> None:
        """Note whether the next micro-batch trains or is forward only."""
        self._forward_only = bool(forward_only)

    def begin(self, model: nn.Module, micro_batch: int) -> None:
        """Begin the forward of a chunk."""
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

    @contextmanager
    def losses(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Record the losses that `forward_step_calc_loss` adds to the list of its schedule, unless it evaluates."""
        found = kwargs.get("forward_data_store", args[7] if len(args) > 7 else None)
        if self._forward_only or not isinstance(found, list):
            yield
            return
        before = len(found)
        yield
        for losses in found[before:]:
            megatron_losses(losses)

    def _evaluates(self) -> bool:
        return self._forward_only and _frame(_SCHEDULES) is not None

    def look(self) -> None:
        """Stop the counter if the forward of a root is the job's own. Called while the counter runs."""
        if _frame(_SCHEDULES) is None:
            self._stop()

    def end(self) -> None:
        """Stop the counter and forget the chunks. Nobody listens any more."""
        self._reached.clear()
        self._forward_only = False
        self._stop()

    def _stop(self) -> None:
        self.counts = False
        end_counted(self)


schedule = _Schedule()
ask, begin, end, losses = schedule.ask, schedule.begin, schedule.end, schedule.losses


def _iteration() -> Optional[int]:
    """Return the finished steps that Megatron's loop counts. None if the job has its own loop."""
    args = getattr(sys.modules.get(_LOOP), "_GLOBAL_ARGS", None)
    number = getattr(args, "curr_iteration", None)
    return number if type(number) is int else None


def adopt() -> None:
    """Begin the micro-batch whose forward this thread is already in."""
    frame = _frame("forward_step")
    if frame is not None and frame.f_locals.get("current_microbatch") is not None:
        begin(frame.f_locals["model"], frame.f_locals["current_microbatch"])


def models_under_way() -> list[nn.Module]:
    """Return the chunks of the schedule that this thread is in. Empty if it is in none."""
    frame = _frame(_SCHEDULES)
    if frame is None:
        return []
    held = frame.f_locals
    models: Any = held.get("model")
    if isinstance(held, dict):
        # Before Python 3.13 this dictionary keeps the frame's tensors alive until the schedule ends.
        held.clear()
    return models if isinstance(models, list) else [models]


def _frame(name: str) -> Optional[FrameType]:
    """Return the innermost frame of a schedules' function whose name begins with `name`."""
    schedules = vars(sys.modules[MODULE]) if MODULE in sys.modules else None
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and not (frame.f_globals is schedules and frame.f_code.co_name.startswith(name)):
        frame = frame.f_back
    return frame
