"""The syncs of a durable run store, and its response to a disk that lost writes.

After a failed sync the kernel marks the pages as clean. The lost data must be written again to other files. If that
fails, the store accepts no more records.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from capd.errors import StoreError
from capd.store.disk.files import FileSystemSyncFailed
from capd.store.disk.layout import Layout
from capd.store.disk.open_files import OpenFiles

__all__ = ["Syncing"]

logger = logging.getLogger(__name__)


class Syncing:
    """The syncs of one run store; owned by the append thread.

    Attributes:
        failed: The reason why no more records are accepted; empty if there is none.
    """

    def __init__(self, layout: Layout, files: OpenFiles, open_shards: Callable[[], Iterable[Path]]) -> None:
        """Start without failures. `open_shards` returns the paths of the run's unsealed shards."""
        self.failed = ""
        self._layout, self._files, self._open_shards = layout, files, open_shards

    def check(self) -> None:
        """Raise StoreError if the disk has lost writes."""
        if self.failed:
            raise StoreError(self.failed)

    def sync(self) -> None:
        """Make everything durable.

        Raises:
            OSError: The sync failed, and so did the sync of new files. The store is then marked as failed.
            StoreError: A file lost data that was written to it.
        """
        try:
            self._sync_tree()
            self._files.sync(self._layout.run)
        except (OSError, StoreError) as error:
            self.fail(error)
            raise

    def _sync_tree(self) -> None:
        """Sync new directories and documents. A failed sync is retried once.

        The retry can write documents again, but not directory entries.
        """
        try:
            with self.doubting():
                self._layout.sync()
        except OSError:
            try:
                self._layout.sync()
            except OSError:
                self._files.cut_back()
                raise

    @contextlib.contextmanager
    def doubting(self) -> Iterator[None]:
        """Distrust every open shard and log if a sync of the whole file system fails in this context."""
        try:
            yield
        except FileSystemSyncFailed:
            # A shard without its file is already renamed.
            self._files.distrust(path for path in self._open_shards() if path.exists())
            self._files.distrust_unsynced()
            raise

    def fail(self, error: Exception) -> None:
        """Record that the disk lost writes: no more records are accepted."""
        self.failed = (
            f"{self._layout.run} accepts no more records: the disk lost unsynced data ({error}); "
            f"check the disk, then restart `capd serve`"
        )
        logger.error("%s", self.failed)
