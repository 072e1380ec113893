"""What `capd ctl` wants of this rank: handed from the client thread to the thread that trains, between two iterations.

The client thread puts the newest STEER down (`receive`); the training thread looks at it when an iteration begins
(`begin`), and only then: a step under way is captured to its end as it began. What holds and what waits is told
to the daemon by whoever looks at `answer` next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Optional, Protocol

from msgspec.structs import replace

from capd_client.errors import ConfigError
from capd_client.process.log import Notices
from capd_client.protocol.control import Steer, Steered
from capd_client.protocol.key import Key

__all__ = ["Steering", "Watch", "Watches"]

_MAX_PROBLEM_CHARS = 1000


class Watch(Protocol):
    """One `watch` of the job: `capd_client.watching.watched.Watched`."""

    def steer(self, steer: Steer) -> int:
        """Capture as told from now on; returns how many modules that are."""
        ...

    def steps_of(self, key: Key) -> Optional[tuple[str, str]]:
        """The steps in which it captures, by its own selection, what has this key, and those of statistics beside that.

        None: that is not its own.
        """
        ...


class Watches(Protocol):
    """Who is told of every `watch`: a session's `Steering`, or a plan."""

    def add(self, watch: Watch) -> None: ...
    def discard(self, watch: Watch) -> None: ...


class Steering:
    """The state that is in force in this process, and the one that waits for its iteration.

    capture: called with whether anything at all is captured from now on.
    """

    def __init__(self, capture: Callable[[bool], None], notices: Notices) -> None:
        self.answer: Optional[Steered] = None  # None: never steered
        self._capture = capture
        self._notices = notices
        self._watches: list[Watch] = []
        self._lock = threading.RLock()  # re-entrant: a signal handler of the job may capture
        self._pending: Optional[Steer] = None

    def receive(self, steer: Steer) -> None:
        """The daemon's word. One that is not newer than what is known is a repetition."""
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
        """An iteration begins on this thread: what was wanted from here on takes effect. Never raises."""
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
                problem=problem or self.answer.problem,  # of a newer one that cannot be read
            )
        self._notices.info("capd ctl: %s from iteration %d on", _in_words(steer), iteration)

    def add(self, watch: Watch) -> None:
        """A model is watched: what is in force holds for it, too."""
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
    return "captures are those of the script" if steer.selection is None else "the selection is another"
