"""The retention of a store root by its daemon: once an hour, `[retention]` of capd.toml decides which runs stay.

It has a thread of its own at the lowest priority, and takes no lock of the pipeline. A run that this daemon has open is
closed first, which only a sealed run without ranks is. Each removal is one line of the log. The newest run stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from capd.errors import CapdError
from capd.lifecycle.checks import current_user
from capd.lifecycle.house_lock import housekeeping
from capd.lifecycle.policy import Policy
from capd.lifecycle.prune import free_due, plan_for, prune_now
from capd.server.runs.registry import Registry
from capd_client.process.text import human_nbytes

__all__ = ["Retention"]

logger = logging.getLogger(__name__)

INTERVAL_S = 3600.0
_NICE = 19
_RELEASE_S = 30.0
_LOOK_S = 0.5


class Retention(threading.Thread):
    """The thread that removes runs by a policy. It ends when the daemon stops, between two runs."""

    def __init__(self, root: Path, policy: Policy, registry: Registry, recovery: threading.Thread) -> None:
        """Prepare the thread. It begins when `recovery` has ended: an unsealed run must be read first."""
        super().__init__(name="capd-retention", daemon=True)
        self._root, self._policy, self._registry, self._recovery = root, policy, registry, recovery
        self._stopping = threading.Event()

    def stop(self, timeout_s: float) -> None:
        """Begin no further removal, and wait for the one in work. A kill in its middle loses nothing either."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout_s)

    def run(self) -> None:
        """Apply the policy now and each hour."""
        with contextlib.suppress(OSError):
            # On Linux this affects the calling thread alone.
            os.nice(max(0, _NICE - os.nice(0)))
        while self._recovery.is_alive():
            if self._stopping.wait(_LOOK_S):
                return
        while True:
            try:
                self._apply()
            except (CapdError, OSError) as error:
                logger.warning("[retention] removes nothing now: %s", error)
            except Exception:
                # This is the outermost loop of the thread: the next hour tries again.
                logger.exception("[retention] failed once")
            if self._stopping.wait(INTERVAL_S):
                return

    def _apply(self) -> None:
        with housekeeping(self._root):
            # The trash first, because a removal needs some space itself.
            for entry, nbytes in free_due(self._root, _failed):
                logger.info("[retention] freed %s of %s in the trash", human_nbytes(nbytes), entry.name)
                if self._stopping.is_set():
                    return
            planned = plan_for(self._root, self._policy, is_unattended=True)
            reasons = {one.facts.path: one.verdict.reason for one in planned}
            going = [one for one in planned if not one.verdict.keep]
            for facts in prune_now(
                self._root, going, f"{current_user()} ([retention])", self._release, _failed
            ):
                logger.info(
                    "[retention] moved run %s to the trash (%s, %s)",
                    facts.run_id, reasons[facts.path], human_nbytes(facts.nbytes),
                )  # fmt: skip
                if self._stopping.is_set():
                    return

    def _release(self, run: Path) -> bool:
        problem = self._registry.release(run.name.removesuffix(".zarr"), _RELEASE_S)
        if problem:
            logger.info("[retention] %s", problem)
        return not problem


def _failed(place: Path, error: Exception) -> None:
    logger.warning("[retention] %s stays: %s", place, error)
