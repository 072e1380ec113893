"""Stands between the store and the kernel: knows what was synced, and fails or stops where a test says.

Syncs of files below the disk's root never reach the kernel: they are entered in the LossyDisk. Writes and renames
pass, unless a fault is armed. Failpoints of the store can end the process, as far as the store can tell: the disk
is copied, and `Killed` goes past every handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from capd.store.catalog.writer import Catalog
from capd.store.disk import failpoints, files
from capd.store.disk.open_files import OpenFiles
from tests.property.kit.lossy_disk import LossyDisk

__all__ = ["Fault", "FaultyFiles", "Killed"]


class Killed(BaseException):
    """The process is dead from here on."""


@dataclass
class Fault:
    """Lets operations fail: `after` more of its kind succeed, then `times` fail. evict: with a failed sync the page
    cache forgets what was written."""

    kind: Literal["sync", "write", "rename"]
    after: int
    times: int = 1
    error: int = errno.EIO
    evict: bool = False


class FaultyFiles:
    """Replaces the functions of `os` and the C library that change or sync files; `patch.undo` brings them back."""

    def __init__(self, patch: pytest.MonkeyPatch, disk: LossyDisk) -> None:
        self.disk = disk
        self.fault: Fault | None = None
        self.fired = 0
        self.failed_syncs = 0
        self._kill: tuple[int, Callable[[], None]] | None = None
        self._opened: list[OpenFiles | Catalog] = []
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync)
        for name in ("pwrite", "pwritev", "copy_file_range"):
            patch.setattr(os, name, self._writing(getattr(os, name)))
        for name in ("replace", "rename", "link"):
            patch.setattr(os, name, self._naming(getattr(os, name)))
        patch.setattr(files, "_libc", _LibC(files._libc, self))
        patch.setattr(failpoints, "_active", _Watched(self._passed))
        self._remember(patch, OpenFiles)
        self._remember(patch, Catalog)
        self._note_durable_writes(patch)

    # -- ends of the process ------------------------------------------------------------------------------

    def kill_after(self, passes: int, last_words: Callable[[], None]) -> None:
        """At the failpoint behind `passes` more of them: call `last_words` and raise Killed."""
        self._kill = (passes, last_words)

    def calm(self) -> None:
        """No more faults, no kill."""
        self.fault = self._kill = None

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """No fault and no kill meanwhile; what is armed stays so."""
        fault, kill, opened = self.fault, self._kill, self._opened
        self.fault, self._kill, self._opened = None, None, []
        try:
            yield
        finally:
            self.fault, self._kill, self._opened = fault, kill, opened

    def abandon(self) -> None:
        """Close the descriptors that the dead process left, without any of its code. A bad disk stays bad."""
        self._kill = None
        for opened in self._opened:
            if isinstance(opened, Catalog):
                opened.abandon()
            else:
                while opened._open:
                    os.close(opened._open.popitem()[1])
        self._opened.clear()

    def _passed(self, name: str) -> None:
        if self._kill is None:
            return
        left, last_words = self._kill
        self._kill = (left - 1, last_words)
        if left == 0:
            self.calm()
            last_words()
            raise Killed(name)

    # -- faults -------------------------------------------------------------------------------------------

    def _fails(self, kind: str) -> Fault | None:
        fault = self.fault
        if fault is None or fault.kind != kind:
            return None
        fault.after -= 1
        if fault.after >= 0:
            return None
        fault.times -= 1
        self.fired += 1
        self.failed_syncs += kind == "sync"
        if fault.times <= 0:
            self.fault = None
        return fault

    def _sync(self, fd: int) -> None:
        if not self.disk.holds(fd):
            return
        if fault := self._fails("sync"):
            self.disk.fail_sync(fd, evict=fault.evict)
            raise OSError(fault.error, os.strerror(fault.error))
        self.disk.sync(fd)

    def sync_all(self, fd: int) -> int:
        """syncfs, as the C library has it."""
        if not self.disk.holds(fd):
            return 0
        if fault := self._fails("sync"):
            self.disk.fail_sync_all(evict=fault.evict)
            ctypes.set_errno(fault.error)
            return -1
        self.disk.sync_all()
        return 0

    def _writing(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(*arguments: Any) -> int:
            target = arguments[1] if real.__name__ == "copy_file_range" else arguments[0]
            if self.fault is None or self.fault.kind != "write" or not self.disk.holds(target):
                return real(*arguments)
            if (fault := self._fails("write")) is None:
                return real(*arguments)
            if real.__name__ == "pwritev":  # a full disk takes a part first
                _write_half(target, arguments[1], arguments[2])
            raise OSError(fault.error, os.strerror(fault.error))

        return write

    def _naming(self, real: Callable[..., None]) -> Callable[..., None]:
        def name(source: Any, target: Any, **options: Any) -> None:
            if str(target).startswith(str(self.disk.root)) and (fault := self._fails("rename")):
                raise OSError(fault.error, os.strerror(fault.error), str(source), None, str(target))
            real(source, target, **options)

        return name

    # -- what the store opened ----------------------------------------------------------------------------

    def _remember(self, patch: pytest.MonkeyPatch, kind: type[Any]) -> None:
        real = kind.__init__

        def init(opened: Any, *arguments: Any, **options: Any) -> None:
            real(opened, *arguments, **options)
            self._opened.append(opened)

        patch.setattr(kind, "__init__", init)

    def _note_durable_writes(self, patch: pytest.MonkeyPatch) -> None:
        write, close = Catalog.write, Catalog.close

        def noting_write(catalog: Catalog, *arguments: Any, durable: bool = False, **options: Any) -> None:
            write(catalog, *arguments, durable=durable, **options)
            if durable and catalog.path.is_relative_to(self.disk.root):
                self.disk.catalog_is_durable()

        def noting_close(catalog: Catalog) -> None:
            close(catalog)
            if catalog.path.is_relative_to(self.disk.root):
                self.disk.catalog_is_durable()

        patch.setattr(Catalog, "write", noting_write)
        patch.setattr(Catalog, "close", noting_close)


class _LibC:
    """The C library, but for syncfs."""

    def __init__(self, real: Any, files_: FaultyFiles) -> None:
        self._real, self.syncfs = real, files_.sync_all

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Watched(dict[str, Any]):
    """In the place of the armed failpoints: tells of every pass, and arms none."""

    def __init__(self, passed: Callable[[str], None]) -> None:
        super().__init__()
        self._passed = passed

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        self._passed(str(name))
        return False


def _write_half(fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
    whole = b"".join(bytes(part) for part in parts)
    path = Path(f"/proc/self/fd/{fd}")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(whole[: len(whole) // 2])
