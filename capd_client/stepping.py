"""Which iteration and micro-batch a job is in, seen from its root forwards and its optimizer's steps.

Needs no change in the job: an optimizer step marks the iteration as finished, the next training forward of a
watched root begins a new one, and every further forward of that root begins a micro-batch. A mark and not a
count, so that several optimizers, or one that steps in parts, still end one iteration. A step that a gradient
scaler skips extends its iteration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from capd_client.key import Moment
from capd_client.untraced import untraced

if TYPE_CHECKING:
    from capd_client.gate import Gate

__all__ = ["Clock", "Context", "clock_of"]


class Context(Protocol):
    """What stepping needs of `capd_client.context`."""

    clock: Optional[Clock]

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


def clock_of(context: Context) -> Clock:
    """The clock of `context`, which all watches of a session share; a plan beside it has a context of its own."""
    if context.clock is None:
        context.clock = Clock(context)
    return context.clock
