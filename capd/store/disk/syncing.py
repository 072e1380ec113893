"""How a durable run store gets its files to the disk, and what it does about a disk that lost what was written.

After a failed sync the kernel calls the pages clean: what was written must be written again, to other files, or the
store takes nothing any more.
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
    """The syncs of one run store; owned by the append thread. open_shards: paths of its shards that are not sealed."""

    def __init__(self, layout: Layout, files: OpenFiles, open_shards: Callable[[], Iterable[Path]]) -> None:
        self.failed = ""  # why nothing is written any more
        self._layout, self._files, self._open_shards = layout, files, open_shards

    def check(self) -> None:
        """Raise StoreError once writes were lost."""
        if self.failed:
            raise StoreError(self.failed)

    def sync(self) -> None:
        """Make everything durable. Raises OSError or StoreError when that failed, on new files, too; see `fail`."""
        try:
            self._sync_tree()
            self._files.sync(self._layout.run)
        except (OSError, StoreError) as error:
            self.fail(error)
            raise

    def _sync_tree(self) -> None:
        """New directories and documents. One failure is tried again: documents can be written anew, entries cannot."""
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
        """A sync of the whole file system that fails in here casts doubt on every open shard and log."""
        try:
            yield
        except FileSystemSyncFailed:
            self._files.distrust(path for path in self._open_shards() if path.exists())  # not renamed yet
            self._files.distrust_unsynced()
            raise

    def fail(self, error: Exception) -> None:
        """The disk lost writes: nothing more is taken."""
        self.failed = (
            f"{self._layout.run} takes no more records: the disk lost what could not be synced ({error}); "
            f"check it, then restart `capd serve`"
        )
        logger.error("%s", self.failed)
