"""The detection of a power loss: whether one is possible since a store's files were last known to be intact."""

from __future__ import annotations

import os
from pathlib import Path

from capd.store.disk.files import opened

__all__ = ["mount_of"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def mount_of(path: Path) -> str:
    """Return a text that stays the same until a reboot or a new mount of `path`.

    The text names the boot of the machine and the mount. While both are the same, the page cache holds everything that
    a killed process wrote. After a change, any part of the unsynced writes may be missing. If /proc does not name them,
    the text is empty.
    """
    with opened(path, os.O_DIRECTORY) as fd:
        try:
            info = dict(
                line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
            )
            return f"{_BOOT_ID.read_text().strip()} {info['mnt_id'].strip()}"
        except (OSError, KeyError, ValueError):
            return ""
