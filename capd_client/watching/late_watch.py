"""The check for a late watch: a compiled graph does not call hooks that were put on after its compilation.

At the time of the watch, nothing shows whether a graph already exists, or whether it will run. So the check runs at the
first optimizer steps. It asks whether the root's hook has run, and in a captured iteration the hooks of every module in
a compiled region. The first answer ends the check.
"""

from __future__ import annotations

import sys
import weakref

from torch import nn

from capd_client.graph.operators import usable
from capd_client.graph.taps import refused
from capd_client.hooks.module_hooks import RootHook
from capd_client.hooks.tap import Tap
from capd_client.process.log import RateLimitedLog
from capd_client.steps.clock import clock_of
from capd_client.steps.gate import Gate

__all__ = ["LateWatch"]

# The watch may come between a forward and its step.
_STEPS_WITHOUT_FORWARD = 2

_TOO_LATE = (
    "if they ran, they ran in graphs that were compiled before the watch. Call watch() before the first "
    "compiled step, or torch.compiler.reset() after watch()"
)
_TOO_OLD = "this torch cannot capture inside compiled graphs. Use a newer torch, or do not use torch.compile"

_notices = RateLimitedLog()


class LateWatch:
    """A check of one watch. It ends after a captured iteration, or with a warning."""

    def __init__(self, model: nn.Module, root: RootHook, gate: Gate, taps: list[Tap]) -> None:
        self._name = type(model).__name__
        self._root = root
        self._gate = gate
        self._clock = clock_of(gate.context)
        self._compiled = _compiled_modules(model)
        self._taps = taps
        self._forwards = 0
        self._steps = 0
        self._clock.after_step.append(self._stepped)

    def cancel(self) -> None:
        """Stop the check."""
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
        due = [tap for tap in self._taps if tap.offers.rules & whole] if whole else []
        if due:
            self.cancel()
            heard = {id(tap.module()) for tap in due if tap.captured_at == iteration}
            # A module counts as heard if one of its products ran, because not every product runs in every call.
            silent = [tap for tap in due if id(tap.module()) not in heard]
            all_in_one_graph = len(silent) == len(due) and _something_is_compiled()
            count = sum(all_in_one_graph or tap.module() in self._compiled for tap in silent)
            if count:
                self._warn(count)

    def _warn(self, silent: int) -> None:
        self.cancel()
        # An earlier warning has already reported that graphs were compiled without taps, and why.
        if refused():
            return
        _notices.warn(
            "late",
            "%d of the %d watched modules of %s are not captured: %s",
            silent,
            len(self._taps),
            self._name,
            _TOO_LATE if usable() else _TOO_OLD,
        )


def _compiled_modules(model: nn.Module) -> weakref.WeakSet[nn.Module]:
    """Return the modules in regions that are marked as compiled (`torch.compile(module)`, `module.compile()`)."""
    inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    for module in model.modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            inside.update(module.modules())
    return inside


def _something_is_compiled() -> bool:
    """Return whether this process has compiled anything, as far as the compiler knows."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(getattr(compiler, "output_codes", None), "seen", False))
