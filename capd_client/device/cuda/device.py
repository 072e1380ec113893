"""The CUDA side of `capd_client.device.seam.Device`: one side stream, pooled events, no host synchronisation."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Optional

import torch

from capd_client.arena.allocator import Slot
from capd_client.device.cuda.bounce import Bounce
from capd_client.device.cuda.raw_calls import DEVICE_TO_DEVICE, DEVICE_TO_HOST, RawCalls, find_raw_calls
from capd_client.device.cuda.runtime import is_capturing, ring_sizes, side_stream, take_thread
from capd_client.device.pieces import Piece
from capd_client.device.ring import RingMemory
from capd_client.device.seam import Event
from capd_client.devstats import fill_rows, prepare, warm
from capd_client.process.log import Notices

__all__ = ["CudaDevice"]


class CudaDevice:
    """One GPU.

    part_end: as in the seam. busy: whether pages are being locked, in which time every call may wait. notices: where to
    say what cannot be had. ring_bytes, raw: the settings.
    """

    def __init__(
        self,
        device: torch.device,
        part_end: Callable[[int], int],
        busy: Callable[[], bool],
        notices: Notices,
        *,
        ring_bytes: Optional[int] = None,
        raw: bool = True,
    ) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        self._stream = side_stream(self._index)
        self._events: deque[torch.cuda.Event] = deque()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._side = self._stream.cuda_stream
        self._raw_wanted = raw
        self._raw: Optional[RawCalls] = None  # until the pump has tried them
        self._busy = busy
        self._ring_bytes = ring_bytes
        self._notices = notices
        self._bounce = Bounce(notices)
        self._pump = 0  # the thread whose current stream is the side stream
        self.part_end = part_end

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on this device's current stream, whatever device is current."""
        return is_capturing(self._device)

    def allocate_ring(self) -> torch.Tensor:
        """The ring; empty when the device has no memory left for it."""
        for nbytes in ring_sizes(self._index, self._ring_bytes, self._notices):
            ring = self.allocate(nbytes)
            if ring.numel():
                break
        return ring

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of the side stream's own pool; empty when the device has none left.

        A block that the job has freed could still be written by what it has queued. What this thread issues next comes
        after what the side stream has in its queue: where algorithms are to be deterministic torch fills new memory
        there.
        """
        # Without the first guard, the second would come back by way of GPU 0.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            except torch.cuda.OutOfMemoryError:
                memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._index).wait_stream(self._stream)
        return memory

    def warm(self, *, rows: bool) -> None:
        """Run what captures run, and what rows take, once on the side stream: later it would wait for the device."""
        # An error here is the job's to tell, or nobody's: without it the first captures are slower.
        with contextlib.suppress(Exception), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            warm(self._device, rows=rows)

    def prepare_rows(self, cancelled: Callable[[], bool], may_load: Callable[[], bool]) -> None:
        """Have the kernels of the statistics made, in the calling thread, which is capd's own."""
        take_thread(self._device)
        prepare(self._device, cancelled, may_load=may_load, stream=self._stream)

    def stream(self) -> int:
        """The handle of this thread's current stream: in a backward that is the autograd engine's choice."""
        return _current_handle(self._index)

    def copy(self, memory: RingMemory, slot: Slot, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """One copy on this thread's current stream; by the runtime itself where it is bytes to bytes."""
        stream = self.stream()
        raw = self._calls(stream)
        if raw is not None and tensor.dtype is dtype and tensor.is_contiguous() and not _is_lazy(tensor):
            raw.copy(memory.address + slot[0], tensor.data_ptr(), tensor.nbytes, DEVICE_TO_DEVICE, stream)
        else:
            memory.write(slot, tensor, dtype)

    def record(self) -> Event:
        """An event on this thread's current stream."""
        return self._record(self.stream(), self._current)

    def _record(self, stream: int, by_torch: Callable[[], torch.cuda.Stream]) -> Event:
        raw = self._calls(stream)
        try:
            event = self._events.pop()
        except IndexError:
            # Which torch makes at its first record.
            event, raw = torch.cuda.Event(blocking=True), None  # type: ignore[no-untyped-call]  # torch's own lack
        if raw is not None:
            raw.record(event.cuda_event, stream)
        else:
            event.record(by_torch())
        return event

    def can_issue(self) -> bool:
        """Where it takes no change of the current stream: a signal handler would run on ours, or leave it behind."""
        return self._calls(self._side) is not None

    def hold_back(self, event: Event) -> None:
        """cudaStreamWaitEvent on this thread's current stream."""
        stream = self.stream()
        raw = self._calls(stream)
        if raw is not None:
            raw.wait(stream, event.cuda_event)
        else:
            self._current().wait_event(event)

    def enter_thread(self) -> None:
        """See `take_thread`; and what this thread issues to the device goes to the side stream from now on."""
        take_thread(self._device)
        torch.cuda.set_stream(self._stream)
        self._pump = threading.get_ident()
        self._try_raw_calls()

    def _try_raw_calls(self) -> None:
        """In the thread of `enter_thread`, once, at a time at which the driver makes nobody wait."""
        if self._raw_wanted and not self._busy():
            self._raw_wanted = False
            self._raw = find_raw_calls(self._device, self._stream)

    def compute(self, segments: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event]) -> None:
        """In the thread of `enter_thread`."""
        for event in after:
            self._stream.wait_event(event)
        fill_rows(segments)

    def fetch(self, piece: Piece, arena: torch.Tensor) -> None:
        """Asynchronous where it is pinned. Otherwise the thread waits, which is that of `enter_thread`.

        Never torch's own waiting: `set_sync_debug_mode("error")` holds for every thread, and would end all captures.
        """
        # Not `_calls` on a training thread: whether pages are locked may have changed since `can_issue`.
        raw = self._calls(self._side) if threading.get_ident() == self._pump else self._raw
        if raw is not None and piece.pinned:
            for event in piece.after:
                raw.wait(self._side, event.cuda_event)
            if piece.nbytes:
                source, target = piece.memory.data_ptr() + piece.start, arena.data_ptr() + piece.offset
                raw.copy(target, source, piece.nbytes, DEVICE_TO_HOST, self._side)
            return
        for event in piece.after:
            self._stream.wait_event(event)
        if piece.nbytes:
            self._fetch_by_torch(piece.source, piece.target(arena), pinned=piece.pinned)

    def _fetch_by_torch(self, source: torch.Tensor, host: torch.Tensor, *, pinned: bool) -> None:
        if pinned:
            self._bounce.let_go()
        if pinned or not self._bounce.bring(source, host, self._fetched_part, self._wait_for_part):
            host.copy_(source, non_blocking=True)

    def _fetched_part(self, source: torch.Tensor, host: torch.Tensor) -> Event:
        host.copy_(source, non_blocking=True)
        return self.fetched()

    def _wait_for_part(self, event: Event) -> None:
        self.wait(event)
        self.recycle(event)

    def fetched(self) -> Event:
        """An event on the side stream."""
        return self._record(self._side, lambda: self._stream)

    def query(self, event: Event) -> bool:
        """cudaEventQuery; on another thread than the pump's only where that disturbs no graph capture."""
        if threading.get_ident() == self._pump:
            self._try_raw_calls()
            return bool(event.query())
        raw = self._calls(self._side)
        return raw is not None and raw.query(event.cuda_event)

    def wait(self, event: Event) -> None:
        """cudaEventSynchronize, without the interpreter's lock; the thread sleeps, since its events are blocking."""
        event.synchronize()

    def recycle(self, event: Event) -> None:
        """Creating events can be expensive while others do it too: they are kept."""
        self._events.append(event)

    def _calls(self, stream: int) -> Optional[RawCalls]:
        """What calls concerning a stream are made by; None: by torch."""
        if self._raw is None or self._busy():
            return None
        # The runtime takes 0 for the default stream of the current device.
        return self._raw if stream or torch.cuda.current_device() == self._index else None

    def _current(self) -> torch.cuda.Stream:
        handle = _current_handle(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._index)
        return stream


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its elements are not those in memory."""
    return tensor.is_neg() or tensor.is_conj() or not tensor.data_ptr()


def _current_handle(index: int) -> int:
    """The handle of the current stream of a GPU, in a twentieth of the time that an object of it takes."""
    ask = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # torch's own generated code calls it
    handle: int = torch.cuda.current_stream(index).cuda_stream if ask is None else ask(index)
    return handle
