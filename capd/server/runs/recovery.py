"""The recovery of runs that an earlier daemon left unsealed. New ranks may come at the same time."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from capd.errors import CapdError
from capd.server.runs.registry import Registry
from capd.server.runs.unsealed import spools

__all__ = ["RunRecovery"]

logger = logging.getLogger(__name__)


class RunRecovery(threading.Thread):
    """The thread that recovers one run after the other. The clock seals each run unless its ranks come back."""

    def __init__(self, root: Path, node: str, registry: Registry) -> None:
        super().__init__(name="capd-recover", daemon=True)
        self._root, self._node, self._registry = root, node, registry
        # The time by which the daemon must stop.
        self._until: float | None = None

    def hurry(self, until: float) -> None:
        """Go on until `until` (monotonic), and seal each run at once, because the daemon's clock has stopped."""
        self._until = until

    def run(self) -> None:
        """Recover the runs."""
        recorder = self._registry.recorder
        held = [] if recorder is None else recorder.left_runs()
        for run_id in dict.fromkeys([*held, *(run_id for run_id, _ in spools(self._root, self._node))]):
            if self._until is not None and time.monotonic() >= self._until:
                # The next start of the daemon goes on.
                return
            logger.info("run %s was left unsealed, recovering it", run_id)
            try:
                self._registry.adopt(run_id)
                if self._until is not None:
                    # A failure of the seal is reported when the pipeline closes.
                    self._registry.seal(run_id)
            except (OSError, CapdError) as error:
                logger.error("run %s cannot be recovered: %s", run_id, error)
