"""The bounce buffers: bytes from a device reach memory that is not page-locked through two small buffers that are.

The driver's own copy to pageable memory makes the thread wait. It may also hold a lock that the job's launches need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from capd_client.arena.host_copy import move
from capd_client.process.log import RateLimitedLog

__all__ = ["BUFFER_NBYTES", "Bounce"]

BUFFER_NBYTES = 8 << 20


def _page_locked(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Bounce:
    """Two page-locked buffers, created when they are first needed. Only one thread uses them."""

    def __init__(
        self,
        notices: RateLimitedLog,
        *,
        nbytes: int = BUFFER_NBYTES,
        allocate: Callable[[int], torch.Tensor] = _page_locked,
    ) -> None:
        """Allocate nothing yet.

        Args:
            notices: Receives one warning if there are no buffers.
            nbytes: The bytes of one buffer.
            allocate: Creates a page-locked uint8 tensor of a number of bytes, or raises RuntimeError.
        """
        self._notices = notices
        self._nbytes = nbytes
        self._allocate = allocate
        self._buffers: list[torch.Tensor] = []
        self._usable = True

    def bring(
        self,
        source: torch.Tensor,
        host: torch.Tensor,
        fetch: Callable[[torch.Tensor, torch.Tensor], Any],
        wait: Callable[[Any], None],
    ) -> bool:
        """Copy `source` to `host`. While one part is moved from its buffer, the next one is copied from the device.

        Args:
            source: uint8, one dimension, on the device.
            host: The same number of bytes of host memory.
            fetch: Issues an asynchronous copy of a part of `source` into a buffer and returns its event.
            wait: Waits for such an event without the GIL. It is called once for each event, in order.

        Returns:
            True when the copy is done. False if there is no page-locked memory, and nothing was copied.

        Raises:
            Exception: `fetch` or `wait` raised it. No buffer is used or released after it, because the device may
                still write.
        """
        if not self._ready():
            return False
        if not source.numel():
            return True
        slices = [slice(start, start + self._nbytes) for start in range(0, source.numel(), self._nbytes)]
        self._usable = False
        coming = self._issue(fetch, 0, source[slices[0]])
        for index, part in enumerate(slices):
            event, target = coming, host[part]
            if index + 1 < len(slices):
                # The buffer of the next part was emptied in the previous round.
                coming = self._issue(fetch, index + 1, source[slices[index + 1]])
            wait(event)
            move(target.data_ptr(), self._buffers[index % 2].data_ptr(), target.numel())
        self._usable = True
        return True

    def let_go(self) -> None:
        """Give the buffers back to torch, which keeps them for others. If needed again, they are created again."""
        if self._usable:
            self._buffers = []

    def _issue(
        self, fetch: Callable[[torch.Tensor, torch.Tensor], Any], index: int, part: torch.Tensor
    ) -> Any:
        return fetch(part, self._buffers[index % 2][: part.numel()])

    def _ready(self) -> bool:
        if self._usable and not self._buffers:
            try:
                self._buffers = [self._allocate(self._nbytes) for _ in range(2)]
            except RuntimeError as error:
                self._usable = False
                self._notices.warn(
                    "no_pinned_memory",
                    "no page-locked memory, copies from devices hold up the job: %s",
                    error,
                )
        return self._usable
