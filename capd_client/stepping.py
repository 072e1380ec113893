"""Which iteration and micro-batch a job is in, seen from its root forwards and its optimizer's steps.

Needs no change in the job: an optimizer step marks the iteration as finished, the next training forward of a
watched root begins a new one, and every further forward of that root begins a micro-batch. A mark and not a
count, so that several optimizers, or one that steps in parts, still end one iteration. A step that a gradient
scaler skips extends its iteration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Optional, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from capd_client.key import Moment
from capd_client.select import Ranges, Selection
from capd_client.untraced import untraced

__all__ = ["Clock", "Context", "Gate", "clock_of"]


class Context(Protocol):
    """What stepping needs of `capd_client.context`."""

    @property
    def iteration(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def bind(self) -> int: ...
    def begin_micro_batch(self) -> None: ...
    def begin_if_dirty(self) -> None: ...
    def optimizer_stepped(self) -> None: ...
    def moment(self, *, call: int = 0, recompute: bool = False) -> Moment: ...


class Gate:
    """Whether the current step is captured, for the taps of one watch.

    A tap's first question is `gate.closed_at == gate.context.iteration`: one comparison when the answer is
    "not captured". Everything else is asked behind it.
    """

    __slots__ = ("_micro_batches", "_open_at", "_own", "_ranks", "_steps", "closed_at", "context")

    def __init__(
        self,
        context: Context,
        steps: Ranges,
        *,
        micro_batches: Ranges | None = None,
        ranks: Ranges | None = None,
    ) -> None:
        self.context = context
        self.closed_at = -1  # the iteration known not to be captured
        self._open_at = -1  # the iteration known to be captured
        self._steps = steps
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._own = (steps, micro_batches, ranks)

    def selects(self, iteration: int) -> bool:
        """Whether all micro-batches of `iteration` are captured on this rank."""
        return self._micro_batches is None and self._chosen(iteration)

    def _chosen(self, iteration: int) -> bool:
        return iteration in self._steps and (self._ranks is None or self.context.rank in self._ranks)

    def admits(self) -> bool:
        """Decide for the current moment. Call it in training forwards only, outside a recompute."""
        context = self.context
        if self._open_at != context.iteration:
            context.begin_if_dirty()
            iteration = context.iteration
            if not self._chosen(iteration):
                self.closed_at = iteration
                return False
            self._open_at = iteration
        return self._micro_batches is None or context.micro_batch in self._micro_batches

    def steer(self, selection: Optional[Selection], *, capturing: bool) -> bool:
        """Put `selection` in the place of the gate's own ranges; returns whether this rank may pass at all."""
        steps, micro_batches, ranks = self._own
        if selection is not None:
            steps = steps if selection.steps is None else Ranges(selection.steps)
            micro_batches = (
                micro_batches if selection.micro_batches is None else Ranges(selection.micro_batches)
            )
            ranks = ranks if selection.ranks is None else Ranges(selection.ranks)
        self._steps, self._micro_batches, self._ranks = steps if capturing else _NEVER, micro_batches, ranks
        self.forget()
        return capturing and (ranks is None or self.context.rank in ranks)

    def forget(self) -> None:
        """Ask again at the next forward: an optimizer has stepped."""
        self.closed_at = self._open_at = -1


_NEVER = Ranges("")


class Clock:
    """Moves one context on, for all watches of the process: `begin_forward` and the optimizer hook."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._gates: list[Gate] = []
        self._lock = threading.Lock()
        self._handle: Optional[RemovableHandle] = None
        self._iteration = -1
        self._forwards: dict[object, int] = {}  # forwards of each root in this iteration
        self._most_forwards = 0
        self.after_step: list[Callable[[], None]] = []  # called after optimizer steps; must not raise

    def begin_forward(self, root: object) -> None:
        """A watched root starts a training forward.

        With several roots (an encoder and a decoder watched apart, a model watched inside another) the
        root that is called most often counts the micro-batches.
        """
        if self.context.iteration != self._iteration:
            self._forwards.clear()
            self._most_forwards = 0
        count = self._forwards.get(root, 0) + 1
        self._forwards[root] = count
        if count > self._most_forwards:
            self._most_forwards = count
            self.context.begin_micro_batch()
        self._iteration = self.context.iteration

    def add(self, gate: Gate) -> None:
        """Let `gate` hear of optimizer steps; the first one installs torch's global hook."""
        with self._lock:
            self._gates.append(gate)
            if self._handle is None:
                self._handle = register_optimizer_step_post_hook(self._optimizer_stepped)

    def discard(self, gate: Gate) -> None:
        """Undo `add`; the last one removes the global hook."""
        with self._lock:
            if gate in self._gates:
                self._gates.remove(gate)
            if not self._gates and self._handle is not None:
                self._handle.remove()
                self._handle = None

    @untraced  # compiled optimizers trace hooks
    def _optimizer_stepped(self, *_: Any) -> None:
        self.context.optimizer_stepped()
        self._iteration = -1  # whichever root is called first now begins the next one
        for gate in self._gates:
            gate.forget()
        for called in tuple(self.after_step):
            called()


_clock: Optional[Clock] = None


def clock_of(context: Context) -> Clock:
    """The process's clock of `context`; a new session has a new context and so a new clock."""
    global _clock
    if _clock is None or _clock.context is not context:
        _clock = Clock(context)
    return _clock
