"""The rules that all models of a job share. A rule is a problem only if it matches nothing in any model.

`watch` cannot know whether a later model has the things that this one lacks. So its problems are held until the first
step is over. While `capd run` still searches for models, they are held until the search ends, at the latest until the
session closes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from capd_client.process.log import RateLimitedLog
from capd_client.rules.problems import Part, Problem
from capd_client.steps.clock import Clock, clock_of
from capd_client.steps.context import Context

__all__ = ["SharedRules", "shared_rules_of"]

_notices = RateLimitedLog()


class SharedRules:
    """The parts of the rules that match a watched model, and the parts that match none until now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._met: set[Part] = set()
        self._reported: set[Part] = set()
        # The text of each problem that is not reported yet, and its models.
        self._open: dict[Part, tuple[str, list[str]]] = {}

    def unmet(self, problems: Iterable[Problem], met: Iterable[Part]) -> list[Problem]:
        """Return the problems that no watched model solves.

        Args:
            problems: The problems of a new model.
            met: The parts of the rules that match the new model.
        """
        self._met.update(met)
        for part in self._met.intersection(self._open):
            del self._open[part]
        return [problem for problem in problems if problem.part not in self._met]

    def hold(self, model: str, problems: Iterable[Problem]) -> None:
        """Hold the problems of a model, until it is known that no other model of the job solves them."""
        for problem in problems:
            if problem.part is None or problem.part in self._reported:
                continue
            _, others = self._open.setdefault(problem.part, (f"{model}: {problem.text}", []))
            others.append(model)
        if self._open and self._stepped not in self._clock.after_step:
            self._clock.after_step.append(self._stepped)

    def report(self) -> None:
        """Warn of the problems that no model solves. All models are known now."""
        if self._stepped in self._clock.after_step:
            self._clock.after_step.remove(self._stepped)
        for part, (text, models) in self._open.items():
            others = ", ".join(dict.fromkeys(models[1:]))
            _notices.warn(text, "%s%s", text, f" (nor is there in {others})" if others else "")
            self._reported.add(part)
        self._open.clear()

    def _stepped(self) -> None:
        search = sys.modules.get("_capd_roots")
        if search is None or not search.searching():
            self.report()


def shared_rules_of(context: Context) -> SharedRules:
    """Return the shared rules of a session. A plan has its own context, and so its own rules."""
    return context.owned(SharedRules, lambda: SharedRules(clock_of(context)))
