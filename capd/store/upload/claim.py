"""The claim of a process on the upload of one node's part of a run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from capd.errors import StoreBusy
from capd.store.disk.files import make_directory

__all__ = ["UploadClaim"]


class UploadClaim:
    """The lock `upload/lock` in the directory of a node. The kernel releases it with its process."""

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            StoreBusy: Another process has it.
            OSError: The directory of the node cannot be used.
        """
        make_directory(directory / "upload")
        self._fd = os.open(
            directory / "upload" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise StoreBusy(
                f"another process uploads {directory.parent.parent}: a daemon with [upload], or `capd upload`",
                retry=True,
            ) from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let another process upload this part. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
