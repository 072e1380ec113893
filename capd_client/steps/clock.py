"""The clock of a job: finds its iteration and micro-batch from root forwards and optimizer steps.

The job needs no change. An optimizer step marks the iteration as finished. The next training forward of a watched
root begins a new iteration, and every further forward of that root begins a micro-batch. The step is a mark, not a
count. So several optimizers, or one that steps in parts, end one iteration.

A framework that counts itself knows better. Its adapter wraps the forward of a micro-batch in `counting`, or calls
`begin_counted` and `end_counted` around it. In between, the framework's numbers are used. Outside, the count continues
from them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Optional

from capd_client.process.log import RateLimitedLog
from capd_client.process.signals import is_interruption
from capd_client.steps import optimizer_steps
from capd_client.steps.context import Context, Counter, as_index
from capd_client.steps.gate import Gate

__all__ = [
    "Clock", "begin_counted", "clock_of", "counting", "end_counted", "evaluate", "iteration_over",
]  # fmt: skip

# After this many micro-batches without any optimizer step, a selected step captures no more micro-batches.
_UNSTEPPED = 256

_UNSTEPPED_TEXT = (
    f"{_UNSTEPPED} forwards and no step of a torch.optim.Optimizer: they count as micro-batches of one iteration. "
    'Only rules with steps="all" capture more of this iteration. If something else updates the parameters, '
    "call capd_client.set_moment(iteration=...) in every iteration"
)

_notices = RateLimitedLog()


class Clock:
    """The clock of one context, for all watches of the process: `begin_forward` and the optimizer hook."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._gates: list[Gate] = []
        self._lock = threading.Lock()
        self._iteration = -1
        # The forwards of each root in this iteration.
        self._forwards: dict[object, int] = {}
        self._most_forwards = 0
        # Whether any optimizer has ever stepped.
        self._stepped = False
        # Called after optimizer steps; must not raise.
        self.after_step: list[Callable[[], None]] = []
        _clocks.add(self)
        if _counters:
            context.follow(_reading)

    def begin_forward(
        self, root: object, *, trains: bool = True, before: Callable[[], None] = lambda: None
    ) -> bool:
        """Begin a forward of a watched root in training mode. Return whether it trains.

        With several roots, the root that is called most often counts the micro-batches. Examples are an encoder and a
        decoder watched separately, or a model watched inside another one.

        Args:
            root: The root module.
            trains: Whether the forward has gradients. Without gradients it is an evaluation. A framework may also
                declare an evaluation.
            before: Called before a training forward is counted; must not raise.
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
        """Begin an evaluation. Report the first one, unless a framework declared it (`said`)."""
        global _evaluation_said
        self.context.evaluating = True
        if not _evaluation_said and not said:
            _evaluation_said = True
            _notices.warn(
                "evaluation",
                "forwards without gradients are taken for evaluation, even in training mode: not captured, not counted",
            )

    def add(self, gate: Gate) -> None:
        """Connect `gate` to optimizer steps."""
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
                self.context.forwards_end()

    def iteration_over(self) -> None:
        """End the iteration. The next forward belongs to the next iteration."""
        self.context.optimizer_stepped()
        # The root that is called first begins the next iteration.
        self._iteration = -1
        for gate in self._gates:
            gate.forget()

    def _give_up_iteration(self) -> None:
        """Close the gates in an iteration that seems to have no end. Otherwise its captures would fill the disk."""
        _notices.warn("unstepped", "%s", _UNSTEPPED_TEXT)
        self.context.on_endless(_UNSTEPPED_TEXT)
        for gate in self._gates:
            gate.end_iteration()

    def _optimizer_stepped(self) -> None:
        self._stepped = True
        self.iteration_over()
        for called in tuple(self.after_step):
            called()


# The clocks of this process. A plan in a job with a session has its own clock.
_clocks: weakref.WeakSet[Clock] = weakref.WeakSet()
_evaluation_said = False
# See `evaluate`.
_evaluates: Optional[Callable[[], bool]] = None
# The counters of frameworks that count at the moment, the innermost last.
_counters: list[Counter] = []


def clock_of(context: Context) -> Clock:
    """Return the clock of `context`, which all watches of a session share. A plan has its own context."""
    return context.owned(Clock, lambda: Clock(context))


def evaluate(asked: Callable[[], bool]) -> None:
    """Declare evaluations of a framework: forwards during which `asked()` is true train nothing, in any mode."""
    global _evaluates
    _evaluates = asked


def iteration_over() -> None:
    """End the iteration on behalf of a framework, also without an optimizer step."""
    for clock in tuple(_clocks):
        clock.iteration_over()


def begin_counted(counter: Counter) -> None:
    """Begin a micro-batch of a framework. Until `end_counted`, `counter` gives iteration and micro-batch.

    If frameworks are inside each other (a Trainer that runs DeepSpeed), the outermost gives the iteration and the
    innermost the micro-batch. A call with a counter that counts already begins its next micro-batch. Never raises.

    Args:
        counter: Called now, and again in the first forward after every optimizer step. Its iteration is the number of
            finished steps, so the first iteration is 0. A number that it returns as None is counted by capd.
    """
    if counter not in _counters:
        _counters.append(counter)
    _follow_counters()


def end_counted(counter: Counter) -> None:
    """Undo `begin_counted`. No effect without a call of it. Never raises."""
    if counter in _counters:
        _counters.remove(counter)
        _follow_counters()


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Call `begin_counted` and `end_counted` around a block."""
    begin_counted(counter)
    try:
        yield
    finally:
        end_counted(counter)


def _follow_counters() -> None:
    for clock in tuple(_clocks):
        clock.context.follow(_reading if _counters else None)


def _reading() -> tuple[Optional[int], Optional[int]]:
    """Return the job's iteration and micro-batch as the counting frameworks give them."""
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
    except Exception as error:
        # An unknown framework may raise anything.
        if is_interruption(error):
            raise
        _notices.warn(
            "counter", "a framework does not give its position, so forwards and steps are counted: %r", error
        )
        return None, None
