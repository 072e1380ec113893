"""One run that a daemon uploads: its upload while there is something to do, and its failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from capd.server.uploads.backoff import Backoff
from capd.store.upload.node_upload import NodeUpload, RoundResult, versions_of

__all__ = ["FollowedRun"]


class FollowedRun:
    """A run. Between its rounds a complete one keeps only what tells that it changed."""

    def __init__(self, run: Path, node: str, begin: Callable[[Path], NodeUpload]) -> None:
        """Follow a run.

        Args:
            run: Its directory.
            node: The name of this node.
            begin: Claims the upload of the run.
        """
        self.run, self.node = run, node
        self.backoff = Backoff()
        # The failure that the log has named.
        self.said = ""
        self._begin = begin
        self._upload: NodeUpload | None = None
        self._seen: object = None

    def round(self) -> RoundResult:
        """Do a round, if anything changed. Raises what `NodeUpload.round` raises."""
        if self._upload is None:
            if self._seen is not None and self._seen == versions_of(self.run, self.node):
                return RoundResult(is_complete=True)
            self._upload = self._begin(self.run)
        result = self._upload.round()
        if self._upload.is_done:
            self._seen = self._upload.seen
            self.close()
        return result

    def close(self) -> None:
        """Let another process upload the run."""
        if self._upload is not None:
            self._upload.close()
            self._upload = None
