"""Takes up what a daemon before left unsealed, beside the ranks that come meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from capd.errors import CapdError
from capd.server.runs.registry import Registry
from capd.server.runs.unsealed import spools

__all__ = ["TakingUp"]

logger = logging.getLogger(__name__)


class TakingUp(threading.Thread):
    """Recovers one run after the other. The clock seals them unless their ranks come back."""

    def __init__(self, root: Path, node: str, registry: Registry) -> None:
        super().__init__(name="capd-recover", daemon=True)
        self._root, self._node, self._registry = root, node, registry
        self._until: float | None = None  # the daemon is to stop by then

    def hurry(self, until: float) -> None:
        """The daemon stops: go on until then (monotonic), and seal each run at once, as the clock stands still."""
        self._until = until

    def run(self) -> None:
        """The thread's work."""
        for run_id, _ in spools(self._root, self._node):
            if self._until is not None and time.monotonic() >= self._until:
                return  # the next start goes on
            logger.info("run %s was left unsealed, taking it up", run_id)
            try:
                self._registry.adopt(run_id)
                if self._until is not None:
                    self._registry.seal(run_id)  # what fails of it is said when the pipeline closes
            except (OSError, CapdError) as error:
                logger.error("run %s cannot be taken up: %s", run_id, error)
