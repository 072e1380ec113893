"""One run that a daemon uploads: its upload while there is something to do, and its failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from capd.server.uploads.backoff import Backoff
from capd.store.upload.moving import ShardMover
from capd.store.upload.node_upload import NodeUpload, RoundResult, versions_of
from capd_client.process.text import human_nbytes

__all__ = ["FollowedRun"]

logger = logging.getLogger(__name__)


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

    def move(self, mover: ShardMover) -> None:
        """Move the shards that are due. Raises what `NodeUpload.round` and `ShardMover.move` raise."""
        if not mover.waits(self.run, self.node):
            return
        if self._upload is None:
            self._upload = self._begin(self.run)
        # A round that finds nothing new, but knows what is there.
        self._upload.round()
        part = self._upload.uploaded()
        before = mover.shards, mover.nbytes
        try:
            if part is not None:
                mover.move([part])
        finally:
            if mover.shards > before[0]:
                logger.info(
                    "[upload] moved %d shards of %s (%s), which are at %s",
                    mover.shards - before[0], self.run, human_nbytes(mover.nbytes - before[1]), self._upload.address,
                )  # fmt: skip
        if self._upload.is_done:
            self._seen = self._upload.seen
            self.close()

    def close(self) -> None:
        """Let another process upload the run."""
        if self._upload is not None:
            self._upload.close()
            self._upload = None
