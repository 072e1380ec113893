"""The watches of a planned job: each captures every step, and is asked which steps it would have captured."""

from __future__ import annotations

from typing import Optional

from capd_client.protocol.control import Steer
from capd_client.protocol.key import Key
from capd_client.protocol.selection import Selection
from capd_client.steps.steering import Watch

__all__ = ["PlannedWatches"]

_EVERY_STEP = Steer(id=1, from_iteration=0, selection=Selection(steps="all"))


class PlannedWatches:
    """Stands where a session's `Steering` does."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []

    def add(self, watch: Watch) -> None:
        """A model is watched: its first steps show what a selected one captures."""
        self._watches.append(watch)
        watch.steer(_EVERY_STEP)

    def discard(self, watch: Watch) -> None:
        """It is no more."""
        self._watches.remove(watch)

    def steps_of(self, key: Key) -> Optional[tuple[str, str]]:
        """The steps in which a watch captures what has this key, and those of statistics beside that.

        None: the job captures it itself.
        """
        found = (watch.steps_of(key) for watch in self._watches)
        return next((steps for steps in found if steps is not None), None)
