"""The watches of a planned job: each watch captures every step, and knows the steps of its own selection."""

from __future__ import annotations

from typing import Optional

from capd_client.protocol.control import Steer
from capd_client.protocol.key import Key
from capd_client.protocol.selection import Selection
from capd_client.steps.steering import Watch

__all__ = ["PlannedWatches"]

_EVERY_STEP = Steer(id=1, from_iteration=0, selection=Selection(steps="all"))


class PlannedWatches:
    """The watches of a plan, in place of a session's `Steering`."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []

    def add(self, watch: Watch) -> None:
        """Add a watch and let it capture every step. Its first steps show the captures of a selected step."""
        self._watches.append(watch)
        watch.steer(_EVERY_STEP)

    def discard(self, watch: Watch) -> None:
        """Remove a watch that has ended."""
        self._watches.remove(watch)

    def steps_of(self, key: Key) -> Optional[tuple[str, str]]:
        """Return the steps in which a watch captures the tensors of this key, and the steps of its statistics.

        Returns:
            None if the job captures the tensor itself.
        """
        found = (watch.steps_of(key) for watch in self._watches)
        return next((steps for steps in found if steps is not None), None)
