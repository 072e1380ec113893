"""The steering of a rank: takes orders of `capd ctl` from the client thread to the training thread.

The client thread stores the newest STEER (`receive`). The training thread looks at it only when an iteration begins
(`begin`). So a step under way is captured to its end as it began. `answer` has the order in force and the one that
waits. The client thread sends it to the daemon.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Optional, Protocol

from msgspec.structs import replace

from capd_client.errors import ConfigError
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.control import Steer, Steered
from capd_client.protocol.key import Key

__all__ = ["Steering", "Watch", "Watches"]

_MAX_PROBLEM_CHARS = 1000


class Watch(Protocol):
    """A `watch` of the job: `capd_client.watching.watched.Watched`."""

    def steer(self, steer: Steer) -> int:
        """Capture as `steer` says from now on. Return the number of captured modules."""
        ...

    def steps_of(self, key: Key) -> Optional[tuple[str, str]]:
        """Return the steps in which the watch's own selection captures this key, and the steps of its statistics.

        Returns:
            None if the key does not belong to this watch.
        """
        ...


class Watches(Protocol):
    """The list of every `watch`: a session's `Steering`, or a plan."""

    def add(self, watch: Watch) -> None: ...
    def discard(self, watch: Watch) -> None: ...


class Steering:
    """The order in force in this process, and the order that waits for its iteration.

    Args:
        capture: Called with False when nothing at all is captured from now on, else with True.
        notices: The log.
    """

    def __init__(self, capture: Callable[[bool], None], notices: RateLimitedLog) -> None:
        # None: this rank was never steered.
        self.answer: Optional[Steered] = None
        self._capture = capture
        self._notices = notices
        self._watches: list[Watch] = []
        # Re-entrant, because a signal handler of the job may capture.
        self._lock = threading.RLock()
        self._pending: Optional[Steer] = None

    def receive(self, steer: Steer) -> None:
        """Take an order of the daemon. An order that is not newer than the known one is a repetition."""
        with self._lock:
            known = self.answer or Steered(id=0)
            if steer.id <= known.id:
                return
            try:
                if steer.selection is not None:
                    steer.selection.check()
            except ConfigError as error:
                self.answer = replace(known, id=steer.id, problem=str(error))
                return
            self._pending = steer
            self.answer = replace(known, id=steer.id, pending=steer, problem="")

    def begin(self, iteration: int) -> None:
        """Begin an iteration on this thread, and follow the order that waits for it. Never raises."""
        if self._pending is None:
            return
        with self._lock:
            steer = self._pending
            if steer is None or iteration < steer.from_iteration or self.answer is None:
                return
            self._pending = None
            modules, problem = self._follow(steer)
            self.answer = Steered(
                id=self.answer.id,
                in_force=steer,
                since=iteration,
                modules=modules,
                # A newer order that cannot be read may have left a problem.
                problem=problem or self.answer.problem,
            )
        self._notices.info("capd ctl: %s from iteration %d on", _in_words(steer), iteration)

    def add(self, watch: Watch) -> None:
        """Add a watch, which follows the order in force."""
        with self._lock:
            self._watches.append(watch)
            if self.answer is not None and self.answer.in_force is not None:
                modules = self.answer.modules + watch.steer(self.answer.in_force)
                self.answer = replace(self.answer, modules=modules)

    def discard(self, watch: Watch) -> None:
        """Undo `add`."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def _follow(self, steer: Steer) -> tuple[int, str]:
        self._capture(steer.capturing)
        followed = [self._lead(watch, steer) for watch in self._watches]
        return sum(modules for modules, _ in followed), next(filter(None, (text for _, text in followed)), "")

    def _lead(self, watch: Watch, steer: Steer) -> tuple[int, str]:
        try:
            return watch.steer(steer), ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:_MAX_PROBLEM_CHARS]
            self._notices.warn("steering", "a watched model could not follow capd ctl: %s", problem)
            return 0, problem


def _in_words(steer: Steer) -> str:
    if not steer.capturing:
        return "nothing is captured"
    return "the script's selection is captured" if steer.selection is None else "a new selection is captured"
