"""The books of each policy: what becomes of a capture that finds no room."""

from __future__ import annotations

from capd_client.allocator import SlotAllocator
from capd_client.books import Books
from capd_client.config import ClientConfig
from capd_client.counting import Counters
from capd_client.parts import PartedBooks
from capd_client.reducing import ReducingBooks
from capd_client.thinning import Thinning

__all__ = ["make_books"]


def make_books(config: ClientConfig, slots: SlotAllocator, counters: Counters) -> Books:
    """Books for `config.policy`: drop it, wait for room (block), leave out whole calls (thin), keep its statistics."""
    step_nbytes = None if config.max_mb_per_step is None else int(config.max_mb_per_step * 1e6)
    if config.max_block_s > 0:
        return PartedBooks(slots, counters, max_block_s=config.max_block_s, step_nbytes=step_nbytes)
    if config.policy == "stats":
        return ReducingBooks(slots, counters, step_nbytes=step_nbytes)
    thinning = Thinning(config.sample_every) if config.policy == "thin" else None
    return Books(slots, counters, step_nbytes=step_nbytes, thinning=thinning)
