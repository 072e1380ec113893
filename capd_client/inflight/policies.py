"""The answers of the policies to an offer without room: drop it, keep its statistics, or send it in parts."""

from __future__ import annotations

from typing import Optional, Union

from capd_client.config.settings import ClientConfig
from capd_client.inflight.capture import Capture
from capd_client.inflight.definitions import Definition
from capd_client.inflight.live import Live
from capd_client.inflight.parts import Record
from capd_client.inflight.thinning import Thinning
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.statistics_row import NO_ROW_DTYPES, ROW_NBYTES

__all__ = ["Block", "Drop", "KeepRows", "policy_of"]

_FULL = frozenset({DropReason.ARENA_FULL, DropReason.STEP_BUDGET})


class Drop:
    """The policies drop and thin: an offer without room is dropped. Under thin, later calls are thinned out.

    `max_block_s` is the longest time that one capture waits for room, over all its parts; 0: no wait. `str` gives the
    consequence of a full buffer, for log lines. The caller of every method holds the queue's lock.
    """

    max_block_s = 0.0

    def __init__(self, thinning: Optional[Thinning] = None) -> None:
        self.thinning = thinning

    def __str__(self) -> str:
        if self.thinning is None:
            return "captures are dropped"
        return f"policy thin keeps one of {self.thinning.one_of} calls from the next one on"

    def no_room(self, wanted: Capture, reason: DropReason, live: Live) -> Union[Capture, DropReason]:
        """Return the capture that replaces one without room, or the reason of the drop.

        Args:
            wanted: The capture without room. It has no slot.
            reason: The reason why there was no room.
            live: Has the slots and the budget of each step.
        """
        if self.thinning is not None and reason in _FULL:
            self.thinning.refused(wanted.descriptor.moment)
        return reason

    def reduces(self, capture: Capture) -> bool:
        """Reduce an admitted capture without room on its device to its statistics. Return whether that was possible."""
        return False


class KeepRows(Drop):
    """The policy stats: an offer without room becomes a capture of its statistics row.

    A row is so small that it nearly always finds room. Without room even for the row, the offer is dropped. 64-bit
    integers are dropped as well, because no row holds their statistics. Rows do not count against `max_mb_per_step`.
    """

    def no_room(self, wanted: Capture, reason: DropReason, live: Live) -> Union[Capture, DropReason]:
        """Return the capture of the row, in its own slot."""
        reducible = reason in _FULL or reason is DropReason.TOO_LARGE
        slot = live.slots.take(ROW_NBYTES) if reducible and _has_row(wanted.definition) else None
        if slot is None:
            return reason
        wanted.slot = slot
        return _reduced(wanted)

    def reduces(self, capture: Capture) -> bool:
        """Replace the payload by the row, unless the payload is smaller than a row."""
        if capture.slot[1] < ROW_NBYTES or not _has_row(capture.definition):
            return False
        _reduced(capture)
        return True


class Block(Drop):
    """The policy block: captures wait for room. A tensor larger than the arena becomes a Record, sent in parts."""

    def __init__(self, max_block_s: float) -> None:
        super().__init__()
        self.max_block_s = max_block_s

    def no_room(self, wanted: Capture, reason: DropReason, live: Live) -> Union[Capture, DropReason]:
        """Return a Record for a tensor that is too large, if the budget of its step has room for all of it."""
        descriptor = wanted.descriptor
        nbytes, iteration = descriptor.nbytes, descriptor.moment.iteration
        if reason is not DropReason.TOO_LARGE:
            return reason
        if not live.step_budget.has_room(iteration, nbytes):
            return DropReason.STEP_BUDGET
        live.step_budget.take(iteration, nbytes)
        return Record(
            descriptor, wanted.definition, wanted.slot, budgeted=nbytes, thread=wanted.thread, kept="parts",
            patience_s=self.max_block_s,
        )  # fmt: skip


def policy_of(config: ClientConfig) -> Drop:
    """Return the policy that the settings name."""
    if config.max_block_s > 0:
        return Block(config.max_block_s)
    if config.policy == "stats":
        return KeepRows()
    return Drop(Thinning(config.sample_every) if config.policy == "thin" else None)


def _has_row(definition: Definition) -> bool:
    return definition.define.dtype not in NO_ROW_DTYPES


def _reduced(capture: Capture) -> Capture:
    """Turn the capture into one of the row at its slot, and return it."""
    descriptor, capture.kept = capture.descriptor, "row"
    descriptor.nbytes, descriptor.payload, descriptor.row_offset = 0, False, capture.slot[0]
    return capture
