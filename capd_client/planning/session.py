"""The session of a job under `capd plan`: plans its first iterations and writes a document per process."""

from __future__ import annotations

from typing import Optional

from capd_client.config.settings import ClientConfig
from capd_client.planning.sink import PlanSink
from capd_client.process.documents import leave

__all__ = ["PlanSession"]


class PlanSession(PlanSink):
    """A session in place of `capd_client.session.session.Session`. It has no daemon and no arena, and copies nothing.

    `config.plan` is the directory of the documents. The session writes its document at its begin, after each
    iteration, and at its end. Errors are logged, and none reaches the job.
    """

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config, self._boundary)
        self._write("running")

    def _boundary(self) -> None:
        self._write("running" if self.enabled else "complete")

    def flush(self, timeout_s: float) -> bool:
        """Return at once, because nothing is ever in flight."""
        return True

    def close(self, timeout_s: Optional[float] = None) -> bool:
        """Write the final document. Idempotent."""
        if self.enabled:
            self.enabled = False
            self._write("ended")
        return True

    def forked(self) -> None:
        """Turn the session off in a forked child."""
        self.enabled = False

    def _write(self, state: str) -> None:
        try:
            leave(self.config.plan or "", self.seen(state))
        except Exception as error:
            self.notices.warn("plan", "the plan cannot be written to %s: %s", self.config.plan, error)
