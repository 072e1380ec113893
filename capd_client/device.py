"""Captures of device tensors: snapshot into a device ring now, copy to the arena on a side stream later.

The seam is `Device`: streams, events and copies of one accelerator. `CudaDevice` (capd_client.cuda) is the real
one; tests use one that delays and reorders. Everything above the seam is here and is the same for both.

The training thread issues one device-to-device copy on its current stream and one event, nothing else: the
snapshot removes races with in-place writes, freed storages and the caching allocator. The client thread
waits for the event on the side stream, copies ring → arena in pieces (others' small copies get their turn
between them) and asks about the oldest copy only, so captures become ready in the order they were taken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Optional, Protocol

import torch

from capd_client.allocator import Extents
from capd_client.books import Books, Capture
from capd_client.protocol import DropReason

__all__ = ["PIECE_NBYTES", "Device", "DeviceStager", "Event", "ring_nbytes"]

PIECE_NBYTES = 32 << 20
_ALIGNMENT = 256
_MAX_RING_NBYTES = 256 << 20
_RING_SHARE = 0.05  # of the free device memory

Event = Any  # the device's own kind


def ring_nbytes(free_nbytes: int) -> int:
    """Size of the snapshot ring: 5 % of the free device memory, at most 256 MiB, whole alignment units."""
    return max(0, min(_MAX_RING_NBYTES, int(free_nbytes * _RING_SHARE))) // _ALIGNMENT * _ALIGNMENT


class Device(Protocol):
    """Streams, events and copies of one accelerator. No method waits for the device, `fetch` apart."""

    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the current stream."""

    def allocate_ring(self) -> torch.Tensor:
        """The ring: uint8, one dimension, on the device, sized by `ring_nbytes`; empty if there is no room."""

    def record(self) -> Event:
        """An event behind everything issued so far on the current stream of this thread."""

    def enter_thread(self) -> None:
        """Called once by the client thread before its first use of the device."""

    def fetch(self, source: torch.Tensor, host: torch.Tensor, after: Event) -> None:
        """Copy device bytes to host bytes on the side stream, behind `after`. Waits only if host is unpinned."""

    def fetched(self) -> Event:
        """An event behind everything issued so far on the side stream."""

    def query(self, event: Event) -> bool:
        """Whether the event has happened. Does not wait."""

    def recycle(self, event: Event) -> None:
        """Give an event that has happened back for reuse."""


class _Snapshot:
    """A capture's bytes in the ring."""

    __slots__ = ("capture", "done", "nbytes", "ready", "start")

    def __init__(self, capture: Capture, start: int, nbytes: int, ready: Event) -> None:
        self.capture = capture
        self.start = start
        self.nbytes = nbytes
        self.ready = ready
        self.done: Event = None


class DeviceStager:
    """Takes snapshots on training threads (`snapshot`) and brings them home on the client thread (`advance`).

    buffer: the arena's bytes. max_block_s: how long `snapshot` may wait for room in the ring (0: never).
    """

    def __init__(self, device: Device, books: Books, buffer: Any, *, max_block_s: float = 0.0) -> None:
        self._device = device
        self._books = books
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            self._host = torch.frombuffer(buffer, dtype=torch.uint8)
            self._ring = device.allocate_ring()
        self._space = Extents(0, self._ring.numel())
        self._room = threading.Condition()
        self._max_block_s = max_block_s
        self._waiting: deque[_Snapshot] = deque()
        self._fetching: deque[_Snapshot] = deque()
        self._entered = False
        self.failed = False

    @property
    def capacity(self) -> int:
        """Largest tensor that the ring holds, in bytes."""
        return self._space.capacity

    @property
    def pending(self) -> bool:
        """Whether copies are under way or due."""
        return bool(self._waiting or self._fetching)

    def is_capturing(self) -> bool:
        """Whether a graph is being captured on the current stream: then nothing may be issued."""
        return self._device.is_capturing()

    def snapshot(self, tensor: torch.Tensor, capture: Capture, dtype: torch.dtype) -> Optional[DropReason]:
        """Copy `tensor`, cast to `dtype`, into the ring on the current stream; a reason if that cannot be.

        The capture becomes ready later, by `advance`.
        """
        nbytes = capture.descriptor.nbytes
        start = self._take(nbytes)
        if start is None:
            return DropReason.RING_FULL
        try:
            source = tensor.detach()
            if dtype is source.dtype and dtype.itemsize == 1:
                source, dtype = (
                    source.view(torch.uint8),
                    torch.uint8,
                )  # not every one-byte dtype has a copy kernel
            self._ring[start : start + nbytes].view(dtype).view(source.shape).copy_(source)
            snapshot = _Snapshot(capture, start, nbytes, self._device.record())
        except BaseException:
            self._give(start, nbytes)
            raise
        self._waiting.append(snapshot)
        return None

    def advance(self) -> int:
        """Start the copies that are due, finish those that are done; returns how many captures became ready."""
        if not self._entered:
            self._device.enter_thread()
            self._entered = True
        while self._waiting:
            snapshot = self._waiting[0]
            self._fetch(snapshot)
            self._waiting.popleft()
            self._fetching.append(snapshot)
        finished = 0
        while self._fetching and self._device.query(self._fetching[0].done):
            self._finish(self._fetching.popleft())
            finished += 1
        return finished

    def fail(self) -> None:
        """After a device error: drop everything under way and every later snapshot as internal errors."""
        self.failed = True
        for snapshots in (self._waiting, self._fetching):
            while snapshots:
                self._books.abort(snapshots.popleft().capture, DropReason.INTERNAL)

    def _fetch(self, snapshot: _Snapshot) -> None:
        offset = snapshot.capture.descriptor.offset
        for first in range(0, snapshot.nbytes, PIECE_NBYTES):
            last = min(first + PIECE_NBYTES, snapshot.nbytes)
            source = self._ring[snapshot.start + first : snapshot.start + last]
            self._device.fetch(source, self._host[offset + first : offset + last], snapshot.ready)
        snapshot.done = self._device.fetched()

    def _finish(self, snapshot: _Snapshot) -> None:
        self._books.ready(snapshot.capture)
        self._give(snapshot.start, snapshot.nbytes)
        self._device.recycle(snapshot.ready)
        self._device.recycle(snapshot.done)

    def _take(self, nbytes: int) -> Optional[int]:
        extent = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._room:
            start = self._space.take(extent)
            if start is None and self._max_block_s > 0 and not self.failed:
                deadline = time.monotonic() + self._max_block_s
                while start is None and not self.failed and (left := deadline - time.monotonic()) > 0:
                    self._room.wait(left)
                    start = self._space.take(extent)
            return start

    def _give(self, start: int, nbytes: int) -> None:
        with self._room:
            self._space.give(start, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
            self._room.notify_all()
