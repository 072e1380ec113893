"""A rank's arena: a sealed memfd mapped shared: counter page, journal, slots.

Its size is an upper limit: pages come by need, see `capd_client.transport.growth`.

The daemon gets the descriptor once and maps the same pages read-only, so a tensor is copied exactly once on its
way out of the training process. There is no name in the file system, nothing to leak, and /dev/shm's size does
not matter. The mapping is made with mmap(2) itself: Python's mmap keeps a duplicate of the descriptor, which a
forked worker would inherit and so keep the memory alive.
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
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _fail(what: str) -> ArenaError:
    number = ctypes.get_errno()
    return ArenaError(f"{what} failed: {os.strerror(number)}")


def _seal(fd: int) -> None:
    """One call, after our own mapping: later mappings are read-only where the kernel knows FUTURE_WRITE."""
    seals = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, _F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, _F_ADD_SEALS, seals)


def _run_on(cpus: Iterable[int]) -> None:
    """Keep this thread, and no other, to these CPUs; where the system does not allow it, it runs where it does."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


class Arena:
    """`nbytes` of shared memory (rounded up to whole pages) for counter page and slots; the journal comes besides.

    `nbytes` is the size of all of it, slots begin at `start`. The journal is sparse: only what was used takes pages.
    Raises ArenaError when the kernel refuses the memfd, its size, the mapping or the seals. `buffer` is a writable
    buffer over all of it, `words` the counter page as u64 words. Neither may be used after `close`.

    From `start`, a multiple of STEP_NBYTES, to `target` the pages are to be there, to `populated` they are. `grown` is
    notified when these are the same, and at every multiple of STEP_NBYTES.

    patience_s: how long from now on the making of pages waits for `near`.
    """

    def __init__(self, nbytes: int, *, patience_s: float = 0.0) -> None:
        slots_nbytes = max(PAGE_NBYTES, -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES - PAGE_NBYTES)
        self.layout = layout_for(slots_nbytes)
        self.start = self.layout.end
        self.nbytes = self.start + slots_nbytes
        self._libc = _libc()
        self._closing = threading.Event()
        self._cpus: frozenset[int] = frozenset()
        self._placed = threading.Event()  # or there is nothing to wait for any more
        self._patient_until = time.monotonic() + patience_s
        self._prefault: threading.Thread | None = None
        self.target = self.populated = self.start
        self.grown = threading.Condition()
        self.address = 0
        self._spare = -1  # a descriptor that is not `fd` yet, or not any more
        try:
            self.fd = os.memfd_create("capd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ArenaError(f"memfd_create failed: {error.strerror}") from error
        try:
            os.ftruncate(self.fd, self.nbytes)
            self.address = self._map(self.fd)
            _seal(self.fd)
        except OSError as error:
            self.close()
            raise ArenaError(
                f"an arena of {self.nbytes} bytes could not be made: {error.strerror}"
            ) from error
        except ArenaError:
            self.close()
            raise
        self.buffer = (ctypes.c_char * self.nbytes).from_address(self.address)
        page = (ctypes.c_uint64 * (PAGE_NBYTES // 8)).from_address(self.address)
        self.words = memoryview(page).cast("B").cast("Q")

    def _map(self, fd: int) -> int:
        """The address of a new mapping that no child inherits."""
        address = self._libc.mmap(None, self.nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            raise _fail(f"mapping {self.nbytes} bytes")
        if self._libc.madvise(address, self.nbytes, _MADV_DONTFORK) != 0:
            error = _fail("madvise(MADV_DONTFORK)")
            self._libc.munmap(address, self.nbytes)
            raise error
        return int(address)

    def near(self, cpus: frozenset[int]) -> None:
        """Have pages made on these CPUs from now on, which puts them into the memory next to them; empty: on any."""
        self._cpus = cpus
        self._placed.set()

    def grow(self, nbytes: int) -> None:
        """Have the pages of the first `nbytes` of slots made in a background thread, from the low addresses up.

        The first copy into an untouched page costs about three times a copy into a present one. One thread calls this.
        """
        end = self.start + -(-nbytes // STEP_NBYTES) * STEP_NBYTES
        self.target = max(self.target, min(self.nbytes, end))
        if self.populated < self.target and self.prefaulted(0):
            thread = threading.Thread(target=self._populate, name="capd-prefault", daemon=True)
            thread.start()
            self._prefault = thread

    def prefaulted(self, timeout_s: float | None = None) -> bool:
        """Whether no pages are being made, after waiting up to `timeout_s` (None: for as long as it takes)."""
        if self._prefault is None:
            return True
        self._prefault.join(timeout_s)
        return not self._prefault.is_alive()

    def _populate(self) -> None:
        """Small pieces with pauses: another thread's mmap waits for a piece, training keeps most of the core.

        Not a niced thread: descheduled while it holds the GIL or the memory map's lock, it would stall training.
        """
        self._placed.wait(max(0.0, self._patient_until - time.monotonic()))
        allowed, cpus = os.sched_getaffinity(0), frozenset[int]()
        while self.populated < self.target and not self._closing.is_set():
            started = time.monotonic()
            if cpus != self._cpus:
                cpus = self._cpus
                _run_on(cpus & allowed or allowed)
            piece = min(_PREFAULT_NBYTES, self.target - self.populated)
            made = self._libc.madvise(self.address + self.populated, piece, _MADV_POPULATE_WRITE) == 0
            with self.grown:
                # Before Linux 5.14 (EINVAL), or out of memory: pages then come at first touch.
                self.populated = self.populated + piece if made else self.target
                if self.populated == self.target or self.populated % STEP_NBYTES == 0:
                    self.grown.notify_all()
            if self._closing.wait(time.monotonic() - started):
                return

    def unload(self) -> None:
        """Take the pages out of this process's tables, not out of the memory: whoever touches one finds it again.

        `replace` does so in one go, which would hold up everybody for tens of milliseconds.
        """
        for offset in range(0, self.nbytes, _PREFAULT_NBYTES):
            self._libc.madvise(
                self.address + offset, min(_PREFAULT_NBYTES, self.nbytes - offset), _MADV_DONTNEED
            )

    def replace(self, kept: Iterable[tuple[int, int]], announce: Callable[[int], None]) -> None:
        """Put fresh memory, without pages, in the place of all but `kept` (offset, bytes), at the same address.

        Sealed against FUTURE_WRITE memory gives no page back. No other thread may write to the arena meanwhile, nor
        pages be made. announce: is given the new descriptor before anything changes here; what it raises ends it.
        Raises ArenaError or OSError, and then nothing has changed. Call `free_old` behind it.
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
                raise _fail("mremap")
        except BaseException:
            if address:
                self._libc.munmap(address, self.nbytes)
            self.free_old()
            raise
        self.fd, self._spare = fd, self.fd
        self.populated = self.target = self.start

    def free_old(self) -> None:
        """Close the descriptor of memory that was replaced. Its pages are freed here, which takes a while."""
        fd, self._spare = self._spare, -1
        if fd >= 0:
            os.close(fd)

    def close_in_child(self) -> None:
        """After fork, in the child: give up the descriptor. The mapping was not inherited."""
        for fd in (self.fd, self._spare):
            if fd >= 0:
                os.close(fd)
        self.fd = self._spare = -1

    def close(self, *, unmap: bool = True) -> None:
        """Close the descriptor and, unless something may still write there, unmap. Idempotent."""
        self._closing.set()
        self._placed.set()
        if self._prefault is not None and self._prefault is not threading.current_thread():
            self._prefault.join()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self.address and unmap:
            self._libc.munmap(self.address, self.nbytes)
            self.address = 0
