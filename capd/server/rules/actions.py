"""The actions of rules: they have the window kept, or change what the ranks of a run capture."""

from __future__ import annotations

import logging
from collections.abc import Callable

from capd.rules.firing import Firing
from capd.rules.schema import TriggerSettings
from capd.window.keeper import Keeper
from capd_client.protocol.control import Control, ControlReply
from capd_client.protocol.selection import Selection

__all__ = ["AlertActions"]

logger = logging.getLogger(__name__)


class AlertActions:
    """What the rules of a daemon do besides telling. Nothing here waits for a rank."""

    def __init__(self, keeper: Keeper, order: Callable[[Control], ControlReply]) -> None:
        """Remember who keeps, and who passes orders on to the ranks of a run."""
        self._keeper, self._order = keeper, order

    def act(self, firing: Firing) -> None:
        """Do what the rule asks for. A problem is logged."""
        rule = firing.rule
        if rule.action == "keep":
            problem = self._keeper.keep(firing.run_id, firing.iteration, rule.name, post=rule.post)
            if problem:
                logger.warning("[trigger] run %s: %s keeps nothing: %s", firing.run_id, rule.name, problem)
        elif rule.action != "warn":
            self._steer(firing.run_id, rule)

    def _steer(self, run_id: str, rule: TriggerSettings) -> None:
        stops = rule.action == "stop-capture"
        # Without wait_s the answer comes at once.
        reply = self._order(
            Control("stop", run_id) if stops else Control("start", run_id, Selection(steps="all"))
        )
        level = logging.INFO if reply.ok else logging.WARNING
        logger.log(level, "[trigger] run %s: %s: %s: %s", run_id, rule.name, rule.action, reply.message)
