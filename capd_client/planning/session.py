"""The session of a job under `capd plan`: plans its first iterations and leaves a document per process."""

from __future__ import annotations

from typing import Optional

from capd_client.config.settings import ClientConfig
from capd_client.planning.sink import PlanSink
from capd_client.process.documents import leave

__all__ = ["PlanSession"]


class PlanSession(PlanSink):
    """Stands where `capd_client.session.session.Session` does; has neither daemon nor arena, and copies nothing.

    `config.plan` is the directory of the documents. A document is written when the session begins, whenever an
    iteration is over, and at the end. Errors are logged; none reaches the job.
    """

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config, self._boundary)
        self._write("running")

    def _boundary(self) -> None:
        self._write("running" if self.enabled else "complete")

    def flush(self, timeout_s: float) -> bool:
        """Nothing is ever on its way."""
        return True

    def close(self, timeout_s: Optional[float] = None) -> bool:
        """The job is over: leave what was seen. Idempotent."""
        if self.enabled:
            self.enabled = False
            self._write("ended")
        return True

    def forked(self) -> None:
        """In a forked child: plan nothing, write nothing."""
        self.enabled = False

    def _write(self, state: str) -> None:
        try:
            leave(self.config.plan or "", self.seen(state))
        except Exception as error:
            self.notices.warn("plan", "the plan cannot be written to %s: %s", self.config.plan, error)
