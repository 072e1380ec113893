"""What the job's log says when a capture found no room: how much there is, what follows, and which setting to raise."""

from __future__ import annotations

from capd_client.books import Books
from capd_client.counter_page import PAGE_NBYTES, DropReason
from capd_client.definitions import Definition
from capd_client.notices import Notices

__all__ = ["RoomNotices"]


class RoomNotices:
    """Warnings about a full arena, device ring or step budget, each at most every 20 s."""

    def __init__(self, books: Books, notices: Notices) -> None:
        self._books = books
        self._notices = notices
        self._consequence = _Consequence(books)

    def not_admitted(self, iteration: int, nbytes: int) -> None:
        """The books have counted a drop instead of giving a slot of `nbytes`."""
        capacity = self._books.slots.capacity
        if self._books.refusing is not None:
            return  # said when the session ended
        budget = self._books.step_budget
        if budget.nbytes is not None and not budget.has_room(iteration, nbytes):
            self._notices.warn(
                DropReason.STEP_BUDGET.value,
                "the captures of iteration %d take max_mb_per_step already; %s. Raise CAPD_MAX_MB_PER_STEP, or "
                "capture fewer tensors per step",
                iteration,
                self._consequence,
            )
        elif nbytes > capacity:
            self._notices.warn(
                DropReason.TOO_LARGE.value,
                "a tensor of %d bytes does not fit into the arena, which holds %d; set CAPD_ARENA_BYTES=%d or more, or "
                "CAPD_POLICY=block, which sends it in parts",
                nbytes,
                capacity,
                -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES + PAGE_NBYTES,
            )
        else:
            self._notices.warn(
                DropReason.ARENA_FULL.value,
                "the arena of %d bytes is full because the daemon is slower than the job, or absent; %s. Raise "
                "CAPD_ARENA_BYTES, capture less, or set CAPD_POLICY=block",
                capacity,
                self._consequence,
            )

    def ring_full(self, capacity: int) -> None:
        """A device's snapshot ring had no room."""
        self._notices.warn(
            DropReason.RING_FULL.value,
            "the device ring of %d bytes is full; %s. Set CAPD_RING=wait, raise CAPD_RING_BYTES, or capture fewer "
            "tensors per step",
            capacity,
            self._consequence,
        )

    def too_large_for_ring(self, definition: Definition, nbytes: int, capacity: int) -> None:
        """A capture that no device ring of this size can ever hold."""
        self._notices.warn(
            DropReason.TOO_LARGE.value,
            "%s is not captured: its %d bytes exceed the device ring of %d bytes; CAPD_POLICY=block sends it in parts",
            definition.key.tensor_name,
            nbytes,
            capacity,
        )

    def reduced(self, nbytes: int) -> None:
        """Policy stats kept the statistics of a tensor of so many bytes."""
        self._notices.warn(
            "reduced",
            "there was no room for a tensor of %d bytes; policy stats kept its statistics. "
            "Raise CAPD_ARENA_BYTES or CAPD_MAX_MB_PER_STEP, or capture less, to keep tensors",
            nbytes,
        )


class _Consequence:
    """What follows, as text; put together only for a line that is written."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def __str__(self) -> str:
        thinning = self._books.thinning
        if thinning is None:
            return "captures are dropped"
        return f"policy thin keeps one of {thinning.one_of} calls from the next one on"
