"""The newest alerts of a run, read from its files while daemons append to them."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path

from capd.errors import CapdError
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import AlertFollower

__all__ = ["MAX_NEWEST_ALERTS", "NewestAlerts"]

MAX_NEWEST_ALERTS = 200
"""The most alerts that are kept."""


class NewestAlerts:
    """Keeps the newest alerts of a run, and counts all. Not thread-safe.

    Attributes:
        counts: The number of alerts by severity.
        fresh: The alerts that the last look found, all of them.
        is_gone: Whether the run was removed, and none of its name has come yet.
        problem: Why the last look failed; "" if it did not.
    """

    def __init__(self, run: Path, node: str | None = None) -> None:
        """Read nothing yet.

        Args:
            run: The directory of the run.
            node: The name of the node; None for all nodes.
        """
        self._run, self._node = run, node
        self._identity: tuple[int, int] | None = None
        self.problem = ""
        self.is_gone = False
        self.fresh: list[Alert] = []
        self._begin()

    def _begin(self) -> None:
        self._follower = AlertFollower(self._run, self._node)
        self._newest: deque[Alert] = deque(maxlen=MAX_NEWEST_ALERTS)
        self.counts: Counter[str] = Counter()

    @property
    def newest(self) -> tuple[Alert, ...]:
        """The newest alerts, the newest last."""
        return tuple(self._newest)

    def look(self) -> bool:
        """Read what is new. Return whether `newest` changed. Raises nothing; see `problem`."""
        is_other, self.fresh = False, []
        try:
            found = self._run.stat()
            identity = found.st_dev, found.st_ino
            # A new directory may have the number of one that was removed.
            if is_other := self.is_gone or self._identity not in (None, identity):
                # The run was removed and begun again with the same name.
                self._begin()
            self._identity, self.is_gone = identity, False
            self.fresh = self._follower.new()
        except FileNotFoundError as error:
            self.is_gone = self._identity is not None
            self.problem = str(error)
            return is_other
        except (CapdError, OSError) as error:
            self.problem = str(error)
            return is_other
        self.problem = ""
        self._newest.extend(self.fresh)
        self.counts.update(alert.severity for alert in self.fresh)
        return is_other or bool(self.fresh)
