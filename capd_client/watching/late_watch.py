"""Says so when a watch came too late: compiled graphs do not see hooks that were put on after they were compiled.

Nothing tells at the time of the watch whether a graph exists already, and whether it is the one that will run. So the
first optimizer steps are looked at: has the root's forward been seen, and in a captured iteration every module of a
compiled region? One look decides, and then nobody looks any more.
"""

from __future__ import annotations

import sys
import weakref

from torch import nn

from capd_client.graph.operators import usable
from capd_client.graph.taps import refused
from capd_client.hooks.module_hooks import RootHook
from capd_client.hooks.tap import Tap
from capd_client.process.log import Notices
from capd_client.steps.clock import Clock
from capd_client.steps.gate import Gate

__all__ = ["LateWatch"]

_STEPS_WITHOUT_FORWARD = 2  # the watch may lie between a forward and its step

_TOO_LATE = (
    "if they ran, then in graphs compiled before the watch, which do not see it. Call watch() before the first "
    "compiled step, or torch.compiler.reset() after watch()"
)
_TOO_OLD = "inside compiled graphs this torch can capture nothing; use a newer one, or no torch.compile"

_notices = Notices()


class LateWatch:
    """Watches over one watch until it has seen a captured iteration, or warned."""

    def __init__(self, model: nn.Module, root: RootHook, gate: Gate, clock: Clock, taps: list[Tap]) -> None:
        self._name = type(model).__name__
        self._root = root
        self._gate = gate
        self._clock = clock
        self._compiled = _compiled_modules(model)
        self._taps = taps
        self._forwards = 0
        self._steps = 0
        clock.after_step.append(self._stepped)

    def cancel(self) -> None:
        """Look no more."""
        if self._stepped in self._clock.after_step:
            self._clock.after_step.remove(self._stepped)

    def _stepped(self) -> None:
        try:
            self._look()
        except Exception as error:
            self.cancel()
            self._root.failed("looking for a late watch", error)

    def _look(self) -> None:
        self._steps += 1
        iteration, before, self._forwards = self._gate.context.iteration, self._forwards, self._root.forwards
        if not self._forwards:
            if self._steps >= _STEPS_WITHOUT_FORWARD and _something_is_compiled():
                self._warn(len(self._taps))
            return
        whole = self._gate.whole(iteration) if self._forwards > before else 0
        due = [tap for tap in self._taps if tap.rules & whole] if whole else []
        if due:
            self.cancel()
            heard = {id(tap.module()) for tap in due if tap.captured_at == iteration}
            silent = [
                tap for tap in due if id(tap.module()) not in heard
            ]  # not every product of a module runs
            all_in_one_graph = len(silent) == len(due) and _something_is_compiled()
            count = sum(all_in_one_graph or tap.module() in self._compiled for tap in silent)
            if count:
                self._warn(count)

    def _warn(self, silent: int) -> None:
        self.cancel()
        if refused():
            return  # that graphs are compiled without taps, and why, was said when it happened
        _notices.warn(
            "late",
            "%d of the %d watched modules of %s give nothing: %s",
            silent,
            len(self._taps),
            self._name,
            _TOO_LATE if usable() else _TOO_OLD,
        )


def _compiled_modules(model: nn.Module) -> weakref.WeakSet[nn.Module]:
    """The modules that lie in regions marked as compiled (`torch.compile(module)`, `module.compile()`)."""
    inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    for module in model.modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            inside.update(module.modules())
    return inside


def _something_is_compiled() -> bool:
    """Whether this process has compiled anything, as far as the compiler tells."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(getattr(compiler, "output_codes", None), "seen", False))
