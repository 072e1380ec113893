"""The measured device: the first GPU, or the CPU in its place, to show that a benchmark runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import capd_client
from capd_client.api import session
from capd_client.device import pieces, transfers

__all__ = ["Accelerator", "amounts"]

PIN_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 240.0
_TICK_S = 0.0002


@contextlib.contextmanager
def amounts(piece: int | None = None, ahead: int | None = None) -> Iterator[tuple[int, int]]:
    """Limit copies to `piece` bytes each and `ahead` bytes in progress, inside the block.

    None: no change. Yields both.
    """
    before = pieces.PIECE_NBYTES, transfers.AHEAD_NBYTES
    pieces.PIECE_NBYTES, transfers.AHEAD_NBYTES = piece or before[0], ahead or before[1]
    try:
        yield pieces.PIECE_NBYTES, transfers.AHEAD_NBYTES
    finally:
        pieces.PIECE_NBYTES, transfers.AHEAD_NBYTES = before


class Accelerator:
    """The measured device and its session.

    Create it after the daemon's endpoint is in the environment. It creates the ring, and the arena at its largest
    size, page-locked. Otherwise the arena would grow during a measurement.
    """

    def __init__(self) -> None:
        self.is_cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")
        rank = session()
        if rank is None:
            raise SystemExit("capture is off: no daemon was found")
        self.session = rank
        self.allocated_before = self.allocated()
        rank.prepare([self.device])
        if self.is_cuda:
            self._wait_until_locked()
        self.wait_until_compiled()

    def _wait_until_locked(self) -> None:
        """Wait until the arena is page-locked. Otherwise copies through pageable memory would be measured."""
        arena, deadline = self.session.arena, time.monotonic() + PIN_TIMEOUT_S
        # The client thread populates the rest.
        arena.target = arena.nbytes
        while arena.populated < arena.target and time.monotonic() < deadline:
            time.sleep(0.05)
        while not self.session.devices.pinned:
            locking = any(thread.name == "capd-pin" for thread in threading.enumerate())
            if not self.session.devices.pinned and not (locking and time.monotonic() < deadline):
                raise SystemExit(
                    "the arena was not page-locked: its notice above says why. Nothing was measured"
                )
            time.sleep(0.05)

    def facts(self) -> dict[str, Any]:
        """Return the facts that a reader of a result needs."""
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else "no GPU: the CPU in its place"
        return {"device": name, "torch": torch.__version__, "pinned": self.session.devices.pinned}

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Return random bf16 values."""
        return torch.randn(nbytes // 2, device=self.device).to(torch.bfloat16)

    def host(self, nbytes: int) -> torch.Tensor:
        """Return a plain page-locked buffer, touched."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def synchronize_stream(self) -> None:
        """Wait only for the current stream, as `loss.item()` does."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def allocated(self) -> int:
        """Return the bytes of device memory in use by tensors."""
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0

    @contextlib.contextmanager
    def no_synchronisation(self) -> Iterator[None]:
        """Inside the block, a call that waits for the device is an error."""
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def wait_until_compiled(self) -> None:
        """Wait until the statistics kernel is ready, or cannot be compiled."""
        for thread in threading.enumerate():
            if thread.name == "capd-compile":
                thread.join(PIN_TIMEOUT_S)

    def wait_until_home(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until every capture's bytes are in the arena. `meanwhile` is called instead of sleeping."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self.session.transport.device_busy and time.monotonic() < deadline:
            time.sleep(_TICK_S) if meanwhile is None else meanwhile()

    def drain(self) -> None:
        """Wait until the daemon has committed everything, and the arena is free again."""
        if not capd_client.flush(DRAIN_TIMEOUT_S):
            raise SystemExit("the daemon did not commit in time")
