"""Brings bytes from a device into memory that is not page-locked, by way of two small buffers that are.

A copy straight into pageable memory is the driver's: it makes the thread wait and may hold, meanwhile, a lock that the
job's launches need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from capd_client.arena.host_copy import move
from capd_client.process.log import Notices

__all__ = ["BUFFER_NBYTES", "Bounce"]

BUFFER_NBYTES = 8 << 20


def _page_locked(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Bounce:
    """Two page-locked buffers, made at first need. One thread uses them.

    Args:
        notices: Says once that there are none.
        nbytes: Bytes of one buffer.
        allocate: Makes a page-locked uint8 tensor of so many bytes, or raises RuntimeError.
    """

    def __init__(
        self,
        notices: Notices,
        *,
        nbytes: int = BUFFER_NBYTES,
        allocate: Callable[[int], torch.Tensor] = _page_locked,
    ) -> None:
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
        """Copy `source` to `host`: while one part of it is moved from its buffer, the next one is on its way.

        Args:
            source: uint8, one dimension, on the device.
            host: As many bytes of host memory.
            fetch: Issues an asynchronous copy of a part of `source` into a buffer and returns its event.
            wait: Waits for such an event without the GIL. It is called once for each, in their order.

        Returns:
            Whether it is done: False where no page-locked memory is to be had, and then nothing was copied.

        Raises:
            Exception: What `fetch` and `wait` raise. No buffer is used or let go after it: the device may still write.
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
                # Its buffer is the one that was emptied in the round before.
                coming = self._issue(fetch, index + 1, source[slices[index + 1]])
            wait(event)
            move(target.data_ptr(), self._buffers[index % 2].data_ptr(), target.numel())
        self._usable = True
        return True

    def let_go(self) -> None:
        """Give the buffers back to torch, which keeps them for others; needed again, they are made again."""
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
