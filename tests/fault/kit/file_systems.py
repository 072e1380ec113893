"""File systems of a test's own: small ones that fill up, and ones whose power can be cut."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["Disk", "mounted_disk", "mounted_tmpfs"]

SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN: nothing reaches the disk any more
NO_LOG_FLUSH = 2  # … not even what the journal holds
DISK_NBYTES = 320 << 20


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """A tmpfs with `options` (size=…, nr_inodes=…) at `directory`; skips where mounting is not permitted."""
    directory.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory))
    except OSError as error:
        pytest.skip(f"needs the permission to mount: {error}")
    try:
        yield directory
    finally:
        _run("umount", "-l", str(directory))


class Disk:
    """A disk image with a file system on it, mounted at `directory`."""

    def __init__(self, kind: str, image: Path, directory: Path) -> None:
        self.kind, self.image, self.directory = kind, image, directory
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"needs mkfs.{kind}")
        directory.mkdir()
        with image.open("wb") as file:
            file.truncate(DISK_NBYTES)
        try:
            _run(f"mkfs.{kind}", "-q", str(image))
            self.mount()
        except OSError as error:
            pytest.skip(f"needs the permission to mount a loop device: {error}")

    def mount(self) -> None:
        """Mount it; the file system replays its journal."""
        _run("mount", "-o", "loop", str(self.image), str(self.directory))

    def unmount(self) -> None:
        """Unmount it."""
        _run("umount", str(self.directory))

    def cut_power(self) -> None:
        """From now on nothing reaches the image: what was not synced is lost."""
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        except OSError as error:
            pytest.skip(f"{self.kind} does not know FS_IOC_SHUTDOWN: {error}")
        finally:
            os.close(fd)


@contextlib.contextmanager
def mounted_disk(kind: str, place: Path) -> Iterator[Disk]:
    """A fresh disk below `place`, unmounted at the end."""
    disk = Disk(kind, place / f"{kind}.img", place / kind)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk.directory)], capture_output=True, timeout=60, check=False)
        disk.image.unlink()
