"""The quota of a job under `capd run --mode single|batch|quick`, and the document of each process about it."""

from __future__ import annotations

import os
import socket
import time
from typing import Optional

from capd_client.config.settings import ClientConfig
from capd_client.process.documents import leave
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.key import Moment
from capd_client.protocol.quota import Collected, Quota, parse_quota
from capd_client.steps.context import Context

__all__ = ["quota_of", "within_quota"]

# The pause between two documents of a quota without an end. Nobody waits for the last of these documents.
_PAUSE_S = 0.2

_notices = RateLimitedLog()


def quota_of(config: ClientConfig, context: Context) -> Optional[Quota]:
    """Return the quota that all watches of a session share; None outside of collection runs."""
    text = config.collect
    if text is None:
        return None
    return context.owned(Quota, lambda: _Document(text, config.collect_dir, context).quota)


def within_quota(config: ClientConfig, context: Context, moment: Moment) -> bool:
    """Return whether the quota has room for an explicit capture at this moment.

    If watches use the quota as well, the context's iteration counts, because a caller may number iterations otherwise.
    """
    quota = quota_of(config, context)
    if quota is None:
        return True
    if quota.watched:
        return quota.take(context.iteration, context.micro_batch)
    return quota.take(moment.iteration, moment.micro_batch)


class _Document:
    """The writer of the process's document after each change of the quota. Errors are logged; none reaches the job."""

    def __init__(self, text: str, directory: Optional[str], context: Context) -> None:
        total, per_iteration = parse_quota(text)
        self.quota = Quota(total, per_iteration, self._changed)
        self._pause_s = _PAUSE_S if total is None else 0.0
        self._directory = directory
        self._context = context
        self._state = ""
        self._at = 0.0
        self._changed()

    def _changed(self) -> None:
        state, now = self.quota.state, time.monotonic()
        if self._directory is None or (state == self._state and now - self._at < self._pause_s):
            return
        self._state, self._at = state, now
        info = self._context.rank_info
        try:
            leave(
                self._directory,
                Collected(
                    rank=info.rank,
                    local_world_size=info.local_world_size,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    kept=self.quota.kept,
                    state=state,
                ),
            )
        except Exception as error:
            _notices.warn(
                "collection",
                "the progress of the collection cannot be written to %s: %s",
                self._directory,
                error,
            )
