"""Tells whether the power may have failed since a store's files were last known to be whole."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["mount_of"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def mount_of(path: Path) -> str:
    """A text that stays the same while nothing but processes ends: the boot of the machine and the mount of `path`.

    What a killed process wrote stands in the page cache until either changes; then any part of what was not synced
    may be missing. Where /proc does not tell, the text is empty.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        info = dict(line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines())
        return f"{_BOOT_ID.read_text().strip()} {info['mnt_id'].strip()}"
    except (OSError, KeyError, ValueError):
        return ""
    finally:
        os.close(fd)
