"""The arena of a rank: a sealed memfd, mapped shared, with counter page, journal and slots.

Its size is an upper limit. Pages are made on demand (`capd_client.transport.growth`).

The daemon gets the descriptor once and maps the same pages read-only. So a tensor is copied exactly once on its way
out of the training process. The memory has no name in the file system, so it cannot leak, and the size of /dev/shm
does not matter. The arena calls mmap(2) itself, because Python's mmap keeps a duplicate of the descriptor. A forked
worker would inherit the duplicate and keep the memory alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from capd_client.errors import ArenaError
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.journal_layout import STEP_NBYTES, layout_for

__all__ = ["STEP_NBYTES", "Arena"]

_PROT_READ_WRITE, _MAP_SHARED = 0x1 | 0x2, 0x01
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 4, 10, 23
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_PREFAULT_NBYTES = 2 << 20


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [pointer, size, size, number, pointer]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


def _error_of(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _seal(fd: int) -> None:
    """Seal the memory with one call, after our own mapping. Later mappings are read-only (Linux 5.1 or newer)."""
    seals = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, _F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, _F_ADD_SEALS, seals)


def _run_on(cpus: Iterable[int]) -> None:
    """Bind only this thread to these CPUs. No effect if the system does not allow it."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


class Arena:
    """The shared memory of a rank.

    Slots begin at `start`, a multiple of STEP_NBYTES. The attribute `nbytes` is the size of everything. The journal is
    sparse: only its used part takes pages. `buffer` is a writable buffer over everything, and `words` is the counter
    page as u64 words. Neither may be used after `close`.

    The pages from `start` to `populated` exist, and the pages up to `target` will be made. `grown` is notified when
    both are equal, and at every multiple of STEP_NBYTES.

    Args:
        nbytes: The bytes for counter page and slots, rounded up to whole pages. The journal is added to them.

    Raises:
        ArenaError: The kernel refuses the memfd, its size, the mapping or the seals.
    """

    def __init__(self, nbytes: int) -> None:
        slots_nbytes = max(PAGE_NBYTES, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES - PAGE_NBYTES)
        self.layout = layout_for(slots_nbytes)
        self.start = self.layout.end
        self.nbytes = self.start + slots_nbytes
        self._libc = _libc()
        self._closing = threading.Event()
        self._cpus: frozenset[int] = frozenset()
        self._prefault: threading.Thread | None = None
        self.target = self.populated = self.start
        self.grown = threading.Condition()
        self.address = 0
        # A descriptor that is not `fd` yet, or not any more.
        self._spare = -1
        self.fd = -1
        try:
            self.fd = os.memfd_create("capd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.nbytes)
            self.address = self._map(self.fd)
            _seal(self.fd)
        except OSError as error:
            self.close()
            raise ArenaError(
                f"an arena of {self.nbytes} bytes could not be made: {error.strerror}"
            ) from error
        self.buffer = (ctypes.c_char * self.nbytes).from_address(self.address)
        page = (ctypes.c_uint64 * (PAGE_NBYTES // 8)).from_address(self.address)
        self.words = memoryview(page).cast("B").cast("Q")

    def _map(self, fd: int) -> int:
        """Map `fd` without inheritance by forked children, and return the address."""
        address = self._libc.mmap(None, self.nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise _error_of(f"mapping {self.nbytes} bytes")
        if self._libc.madvise(address, self.nbytes, _MADV_DONTFORK) != 0:
            error = _error_of("madvise(MADV_DONTFORK)")
            self._libc.munmap(address, self.nbytes)
            raise error
        return int(address)

    def near(self, cpus: frozenset[int]) -> None:
        """Make pages on these CPUs from now on, so that they are in the memory next to them. Empty: on any CPU."""
        self._cpus = cpus

    def grow(self, nbytes: int) -> None:
        """Make the pages of the first `nbytes` of slots in a background thread, from low to high addresses.

        The first copy into an untouched page costs about three times a copy into a present one. Only one thread may
        call this.

        Raises:
            RuntimeError: The system allows no further thread.
        """
        end = self.start + -(-nbytes // STEP_NBYTES) * STEP_NBYTES
        self.target = max(self.target, min(self.nbytes, end))
        if self.populated < self.target and self.prefaulted(0):
            thread = threading.Thread(target=self._populate, name="capd-prefault", daemon=True)
            thread.start()
            self._prefault = thread

    def prefaulted(self, timeout_s: float | None = None) -> bool:
        """Wait up to `timeout_s` (None: without limit). Return whether no pages are being made."""
        if self._prefault is None:
            return True
        self._prefault.join(timeout_s)
        return not self._prefault.is_alive()

    def _populate(self) -> None:
        """Make pages in small pieces with pauses.

        An mmap of another thread waits for at most one piece, and training keeps most of the core. The thread is not
        niced. If it lost its CPU with the GIL or the memory map's lock held, it would stall training.
        """
        allowed, cpus = os.sched_getaffinity(0), frozenset[int]()
        while self.populated < self.target and not self._closing.is_set():
            started = time.monotonic()
            if cpus != self._cpus:
                cpus = self._cpus
                _run_on(cpus & allowed or allowed)
            piece = min(_PREFAULT_NBYTES, self.target - self.populated)
            made = self._libc.madvise(self.address + self.populated, piece, _MADV_POPULATE_WRITE) == 0
            with self.grown:
                # Before Linux 5.14 (EINVAL), or without free memory, pages are made at the first touch instead.
                self.populated = self.populated + piece if made else self.target
                if self.populated == self.target or self.populated % STEP_NBYTES == 0:
                    self.grown.notify_all()
            if self._closing.wait(time.monotonic() - started):
                return

    def unload(self) -> None:
        """Remove the pages from this process's page tables. They stay in memory, so a touch finds them again.

        Without this, `replace` would remove them at once and delay every thread for tens of milliseconds.
        """
        for offset in range(0, self.nbytes, _PREFAULT_NBYTES):
            self._libc.madvise(
                self.address + offset, min(_PREFAULT_NBYTES, self.nbytes - offset), _MADV_DONTNEED
            )

    def replace(self, kept: Iterable[tuple[int, int]], announce: Callable[[int], None]) -> None:
        """Replace the memory by new memory without pages, at the same address. Call `free_old` afterwards.

        Memory sealed against FUTURE_WRITE gives no page back. During the call, no other thread may write to the arena,
        and no pages may be made. After an error, nothing has changed.

        Args:
            kept: The offset and size of each area to copy into the new memory.
            announce: Called with the new descriptor before anything changes here. Its errors end the call.

        Raises:
            OSError: The kernel refused the memfd, the mapping or the seals, or `announce` failed.
        """
        fd = self._spare = os.memfd_create("capd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        address = 0
        try:
            os.ftruncate(fd, self.nbytes)
            address = self._map(fd)
            _seal(fd)
            for offset, nbytes in kept:
                ctypes.memmove(address + offset, self.address + offset, nbytes)
            announce(fd)
            moved = self._libc.mremap(
                address, self.nbytes, self.nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, self.address
            )
            if moved != self.address:
                raise _error_of("mremap")
        except BaseException:
            if address:
                self._libc.munmap(address, self.nbytes)
            self.free_old()
            raise
        self.fd, self._spare = fd, self.fd
        self.populated = self.target = self.start

    def free_old(self) -> None:
        """Close the descriptor of replaced memory. This frees its pages, which takes some time."""
        fd, self._spare = self._spare, -1
        if fd >= 0:
            os.close(fd)

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child. The child has not inherited the mapping."""
        for fd in (self.fd, self._spare):
            if fd >= 0:
                os.close(fd)
        self.fd = self._spare = -1

    def close(self, *, unmap: bool = True) -> None:
        """Close the descriptor and unmap the memory. Idempotent.

        Args:
            unmap: False if something may still write to the memory, which then stays mapped.
        """
        self._closing.set()
        if self._prefault is not None and self._prefault is not threading.current_thread():
            self._prefault.join()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self.address and unmap:
            self._libc.munmap(self.address, self.nbytes)
            self.address = 0
