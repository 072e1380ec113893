"""Rules that all models of a job share: one is to blame only where it means something of none of them.

`watch` cannot know whether a later model has what this one lacks. So what it finds is held until the first step is
over, or, while `capd run` still searches for models, until that search ends; at the latest until the session closes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from capd_client.process.log import Notices
from capd_client.rules.problems import Part, Problem
from capd_client.steps.clock import Clock, clock_of
from capd_client.steps.context import Context

__all__ = ["SharedRules", "shared_rules_of"]

_notices = Notices()


class SharedRules:
    """What the models watched so far lack of the rules, and what one of them has."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._met: set[Part] = set()
        self._told: set[Part] = set()
        self._open: dict[Part, tuple[str, list[str]]] = {}  # what is to be said, and the further models

    def unmet(self, problems: Iterable[Problem], met: Iterable[Part]) -> list[Problem]:
        """Those of the problems that no model watched so far answers. met: what the model has of the rules."""
        self._met.update(met)
        for part in self._met.intersection(self._open):
            del self._open[part]
        return [problem for problem in problems if problem.part not in self._met]

    def hold(self, model: str, problems: Iterable[Problem]) -> None:
        """Say these of the model when it is known that no other one of the job has what it lacks."""
        for problem in problems:
            if problem.part is None or problem.part in self._told:
                continue
            _, others = self._open.setdefault(problem.part, (f"{model}: {problem.text}", []))
            others.append(model)
        if self._open and self._stepped not in self._clock.after_step:
            self._clock.after_step.append(self._stepped)

    def tell(self) -> None:
        """All models are there: warn of what none of them has."""
        if self._stepped in self._clock.after_step:
            self._clock.after_step.remove(self._stepped)
        for part, (text, models) in self._open.items():
            others = ", ".join(dict.fromkeys(models[1:]))
            _notices.warn(text, "%s%s", text, f" (nor is there in {others})" if others else "")
            self._told.add(part)
        self._open.clear()

    def _stepped(self) -> None:
        search = sys.modules.get("_capd_roots")
        if search is None or not search.searching():
            self.tell()


def shared_rules_of(context: Context) -> SharedRules:
    """Those of a session; a plan beside it has its own."""
    return context.owned(SharedRules, lambda: SharedRules(clock_of(context)))
