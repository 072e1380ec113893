"""Which iteration and micro-batch a job is in, seen from its root forwards and its optimizer's steps.

Needs no change in the job: an optimizer step marks the iteration as finished, the next training forward of a
watched root begins a new one, and every further forward of that root begins a micro-batch. A mark and not a
count, so that several optimizers, or one that steps in parts, still end one iteration.

A framework that counts for itself knows better: an adapter wraps whatever runs the forward of a micro-batch in
`counting`, or calls `begin_counted` and `end_counted` around it. In between its numbers hold, outside of it the
counting goes on from them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional

from capd_client.process.log import Notices
from capd_client.process.signals import is_interruption
from capd_client.steps import optimizer_steps
from capd_client.steps.context import Context, Counter, as_index
from capd_client.steps.gate import Gate

__all__ = [
    "Clock", "begin_counted", "clock_of", "counting", "end_counted", "evaluate", "iteration_over",
]  # fmt: skip

_UNSTEPPED = 256  # micro-batches without any optimizer step after which no more of a chosen step are captured

_UNSTEPPED_TEXT = (
    f"{_UNSTEPPED} forwards and no step of a torch.optim.Optimizer: they count as micro-batches of one iteration, and "
    'of it nothing more is captured, except by rules with steps="all". Where something else updates the parameters, '
    "call capd_client.set_moment(iteration=...) in every iteration"
)

_notices = Notices()


class Clock:
    """Moves one context on, for all watches of the process: `begin_forward` and the optimizer hook."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._gates: list[Gate] = []
        self._lock = threading.Lock()
        self._iteration = -1
        self._forwards: dict[object, int] = {}  # forwards of each root in this iteration
        self._most_forwards = 0
        self._stepped = False  # whether any optimizer ever did
        self.after_step: list[Callable[[], None]] = []  # called after optimizer steps; must not raise
        _clocks.add(self)
        if _counters:
            context.follow(_reading)

    def begin_forward(
        self, root: object, *, trains: bool = True, before: Callable[[], None] = lambda: None
    ) -> bool:
        """A watched root starts a forward in training mode; returns whether it trains.

        trains: whether it has gradients. Without them, or where a framework says so, it is an evaluation.
        before: called before a training forward is counted; must not raise.

        With several roots (an encoder and a decoder watched apart, a model watched inside another) the
        root that is called most often counts the micro-batches.
        """
        said = _evaluates is not None and _evaluates()
        if said or not trains:
            self._begin_evaluation(said)
            return False
        context = self.context
        context.evaluating = False
        before()
        if context.counted:
            context.begin_if_dirty()
            return True
        if context.iteration != self._iteration:
            self._forwards.clear()
            self._most_forwards = 0
        count = self._forwards.get(root, 0) + 1
        self._forwards[root] = count
        if count > self._most_forwards:
            self._most_forwards = count
            context.begin_micro_batch()
            if count == _UNSTEPPED + 1 and not (self._stepped or context.iteration_is_set):
                self._give_up_iteration()
        self._iteration = context.iteration
        return True

    def _begin_evaluation(self, said: bool) -> None:
        """said: whether a framework says so; what capd takes for one by itself, it tells."""
        global _evaluation_said
        self.context.evaluating = True
        if not _evaluation_said and not said:
            _evaluation_said = True
            _notices.warn(
                "evaluation",
                "forwards without gradients are taken for evaluation, in training mode, too: not captured, not counted",
            )

    def add(self, gate: Gate) -> None:
        """Let `gate` hear of optimizer steps."""
        with self._lock:
            if not self._gates:
                optimizer_steps.listen(self._optimizer_stepped)
            self._gates.append(gate)

    def discard(self, gate: Gate) -> None:
        """Undo `add`."""
        with self._lock:
            if gate not in self._gates:
                return
            self._gates.remove(gate)
            if not self._gates:
                optimizer_steps.forget(self._optimizer_stepped)

    def iteration_over(self) -> None:
        """What comes next belongs to the next iteration."""
        self.context.optimizer_stepped()
        self._iteration = -1  # whichever root is called first now begins the next one
        for gate in self._gates:
            gate.forget()

    def _give_up_iteration(self) -> None:
        """It seems to have no end: what is captured in some steps only would be captured until the disk is full."""
        _notices.warn("unstepped", "%s", _UNSTEPPED_TEXT)
        self.context.seems_endless(_UNSTEPPED_TEXT)
        for gate in self._gates:
            gate.end_iteration()

    def _optimizer_stepped(self) -> None:
        self._stepped = True
        self.iteration_over()
        for called in tuple(self.after_step):
            called()


_clocks: weakref.WeakSet[Clock] = weakref.WeakSet()  # of this process: a plan beside a session has its own
_evaluation_said = False
_evaluates: Optional[Callable[[], bool]] = None  # see `evaluate`
_counters: list[Counter] = []  # of frameworks that count at the moment, the innermost last


def clock_of(context: Context) -> Clock:
    """The clock of `context`, which all watches of a session share; a plan beside it has a context of its own."""
    return context.owned(Clock, lambda: Clock(context))


def evaluate(asked: Callable[[], bool]) -> None:
    """Forwards during which `asked()` holds train nothing, says a framework, whatever the mode of their modules."""
    global _evaluates
    _evaluates = asked


def iteration_over() -> None:
    """A framework's iteration ends, also where no optimizer steps."""
    for clock in tuple(_clocks):
        clock.iteration_over()


def begin_counted(counter: Counter) -> None:
    """A framework begins a micro-batch: until `end_counted`, iteration and micro-batch are what `counter` returns.

    It is asked at once, and again in the first forward after every optimizer step. Iterations are the steps
    finished before, so that the first is 0. What it returns None for is counted as ever. Of frameworks inside each
    other (a Trainer that runs DeepSpeed) the outermost tells the iteration, the innermost the micro-batch. Called
    again with a counter that counts already, its next micro-batch begins. Never raises.
    """
    if counter not in _counters:
        _counters.append(counter)
    _tell()


def end_counted(counter: Counter) -> None:
    """Undo `begin_counted`; does nothing where that was not called. Never raises."""
    if counter in _counters:
        _counters.remove(counter)
        _tell()


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """`begin_counted` and `end_counted` around a block."""
    begin_counted(counter)
    try:
        yield
    finally:
        end_counted(counter)


def _tell() -> None:
    for clock in tuple(_clocks):
        clock.context.follow(_reading if _counters else None)


def _reading() -> tuple[Optional[int], Optional[int]]:
    """Where the frameworks that count say the job is."""
    iteration, micro_batch = None, None
    try:
        for counter in _counters:
            its_iteration, its_micro_batch = counter()
            iteration = its_iteration if iteration is None else iteration
            micro_batch = micro_batch if its_micro_batch is None else its_micro_batch
        return (
            None if iteration is None else as_index("iteration", iteration),
            None if micro_batch is None else as_index("micro_batch", micro_batch),
        )
    except Exception as error:  # a framework never seen
        if is_interruption(error):
            raise
        _notices.warn(
            "counter", "a framework does not say where it is, so forwards and steps are counted: %r", error
        )
        return None, None
