"""The CUDA implementation of `capd_client.device.seam.Device`.

It has one side stream, pooled events, and no host synchronisation.
"""

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
from capd_client.process.log import RateLimitedLog

__all__ = ["CudaDevice"]


class CudaDevice:
    """A GPU."""

    def __init__(
        self,
        device: torch.device,
        part_end: Callable[[int], int],
        busy: Callable[[], bool],
        notices: RateLimitedLog,
        *,
        ring_bytes: Optional[int] = None,
        raw: bool = True,
    ) -> None:
        """Bind to a GPU.

        Args:
            device: The device; without an index, the current one.
            part_end: As in the seam.
            busy: Returns whether pages are being locked. Every call may wait during this time.
            notices: The log of the session's warnings.
            ring_bytes: The setting.
            raw: The setting `gpu_calls`: call the runtime directly where possible.
        """
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        self._stream = side_stream(self._index)
        self._events: deque[torch.cuda.Event] = deque()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._side = self._stream.cuda_stream
        self._raw_wanted = raw
        # None until the pump has tried them.
        self._raw: Optional[RawCalls] = None
        self._busy = busy
        self._ring_bytes = ring_bytes
        self._notices = notices
        self._bounce = Bounce(notices)
        # The thread whose current stream is the side stream.
        self._pump = 0
        self.part_end = part_end

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured on this device's current stream. Any device may be current."""
        return is_capturing(self._device)

    def allocate_ring(self) -> torch.Tensor:
        """Return the ring; empty if the device has no memory left for it."""
        for nbytes in ring_sizes(self._index, self._ring_bytes, self._notices):
            ring = self.allocate(nbytes)
            if ring.numel():
                break
        return ring

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory of the side stream's own pool; empty if the device has none left.

        Queued work of the job could still write to a block that the job has freed, so the job's pool is not used.
        Later work of this thread waits for the side stream. In deterministic mode, torch fills new memory on that
        stream.
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
        """Run the kernels of captures once on the side stream. Later, the first run would wait for the device.

        rows: also run the kernels of statistics rows.
        """
        # The job will see a device error itself. After any other error, only the first captures are slower.
        with contextlib.suppress(Exception), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            warm(self._device, rows=rows)

    def prepare_rows(self, cancelled: Callable[[], bool], may_load: Callable[[], bool]) -> None:
        """Compile the kernels of the statistics in the calling thread, which is capd's own.

        Args:
            cancelled: Returns whether the kernels are no longer wanted.
            may_load: Returns whether a module may be loaded now.
        """
        take_thread(self._device)
        prepare(self._device, cancelled, may_load=may_load, stream=self._stream)

    def stream(self) -> int:
        """Return the handle of this thread's current stream. In a backward, the autograd engine chooses it."""
        return _current_handle(self._index)

    def copy(self, memory: RingMemory, slot: Slot, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Issue one copy on this thread's current stream, by the runtime itself if the bytes stay the same."""
        stream = self.stream()
        raw = self._calls(stream)
        if raw is not None and tensor.dtype is dtype and tensor.is_contiguous() and not _is_lazy(tensor):
            raw.copy(memory.address + slot[0], tensor.data_ptr(), tensor.nbytes, DEVICE_TO_DEVICE, stream)
        else:
            memory.write(slot, tensor, dtype)

    def record(self) -> Event:
        """Record an event on this thread's current stream."""
        return self._record(self.stream(), self._current)

    def _record(self, stream: int, by_torch: Callable[[], torch.cuda.Stream]) -> Event:
        raw = self._calls(stream)
        try:
            event = self._events.pop()
        except IndexError:
            # torch creates the event at its first record, so torch must record it.
            event, raw = torch.cuda.Event(blocking=True), None  # type: ignore[no-untyped-call]  # torch's own lack
        if raw is not None:
            raw.record(event.cuda_event, stream)
        else:
            event.record(by_torch())
        return event

    def can_issue(self) -> bool:
        """Return whether copies can be issued without a change of the current stream.

        After a change, a signal handler of the job would run on capd's stream, or leave it as the current stream.
        """
        return self._calls(self._side) is not None

    def hold_back(self, event: Event) -> None:
        """Call cudaStreamWaitEvent on this thread's current stream."""
        stream = self.stream()
        raw = self._calls(stream)
        if raw is not None:
            raw.wait(stream, event.cuda_event)
        else:
            self._current().wait_event(event)

    def enter_thread(self) -> None:
        """Do the same as `take_thread`, and direct the work of this thread to the side stream from now on."""
        take_thread(self._device)
        torch.cuda.set_stream(self._stream)
        self._pump = threading.get_ident()
        self._try_raw_calls()

    def _try_raw_calls(self) -> None:
        """Try the raw calls once, in the thread of `enter_thread`, when the driver makes nobody wait."""
        if self._raw_wanted and not self._busy():
            self._raw_wanted = False
            self._raw = find_raw_calls(self._device, self._stream)

    def compute(self, segments: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event]) -> None:
        """Write the statistics rows, in the thread of `enter_thread`."""
        for event in after:
            self._stream.wait_event(event)
        fill_rows(segments)

    def fetch(self, piece: Piece, arena: torch.Tensor) -> None:
        """Copy the piece, asynchronously if it is pinned. Otherwise the thread waits, which is that of `enter_thread`.

        torch's own waiting is never used: `set_sync_debug_mode("error")` holds for every thread and would end all
        captures.
        """
        # A training thread does not ask `_calls`: page locking may have begun since `can_issue`.
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
        """Record an event on the side stream."""
        return self._record(self._side, lambda: self._stream)

    def query(self, event: Event) -> bool:
        """Call cudaEventQuery. A thread other than the pump's calls it only if that disturbs no graph capture."""
        if threading.get_ident() == self._pump:
            self._try_raw_calls()
            return bool(event.query())
        raw = self._calls(self._side)
        return raw is not None and raw.query(event.cuda_event)

    def wait(self, event: Event) -> None:
        """Call cudaEventSynchronize without the interpreter's lock. The thread sleeps: the events are blocking."""
        event.synchronize()

    def recycle(self, event: Event) -> None:
        """Keep the event, because creating events can be expensive while others create some, too."""
        self._events.append(event)

    def _calls(self, stream: int) -> Optional[RawCalls]:
        """Return the raw calls for a stream; None: torch makes the calls."""
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
    """Return whether its elements differ from the bytes in memory."""
    return tensor.is_neg() or tensor.is_conj() or not tensor.data_ptr()


def _current_handle(index: int) -> int:
    """Return the handle of a GPU's current stream, in a twentieth of the time of a stream object."""
    # torch's own generated code calls this function.
    ask = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle: int = torch.cuda.current_stream(index).cuda_stream if ask is None else ask(index)
    return handle
