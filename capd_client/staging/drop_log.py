"""The drop log: the dropped captures, the reason, and the setting to raise; each reason at most every 20 s."""

from __future__ import annotations

from capd_client.inflight.capture import Refused
from capd_client.inflight.definitions import Definition
from capd_client.inflight.parts import Record
from capd_client.inflight.policies import Drop
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason

__all__ = ["DropLog"]


class DropLog:
    """A writer of log lines about the queue's decisions. It does not decide anything itself."""

    def __init__(self, notices: RateLimitedLog, policy: Drop) -> None:
        self._notices = notices
        # Its text names the consequence. The text is made only for a line that is written.
        self._policy = policy

    def unfit(self, refused: Refused) -> None:
        """Report a tensor that cannot be captured as it is."""
        name = refused.name if refused.definition is None else refused.definition.key.tensor_name
        self._notices.warn(refused.reason.value, "%s is not captured: %s", name, refused.problem)

    def no_room(self, refused: Refused) -> None:
        """Report an offer that the queue refused. The end of a session and `capd ctl stop` have their own lines."""
        reason = refused.reason
        if reason is DropReason.STEP_BUDGET:
            self._notices.warn(
                reason.value,
                "the captures of iteration %d take max_mb_per_step already; %s. Raise CAPD_MAX_MB_PER_STEP, or "
                "capture fewer tensors per step",
                refused.iteration,
                self._policy,
            )
        elif reason is DropReason.TOO_LARGE:
            self._notices.warn(
                reason.value,
                "a tensor of %d bytes does not fit into the arena, which holds %d; set CAPD_ARENA_BYTES=%d or more, or "
                "CAPD_POLICY=block, which sends it in parts",
                refused.nbytes,
                refused.capacity,
                -(-refused.nbytes // PAGE_NBYTES) * PAGE_NBYTES + PAGE_NBYTES,
            )
        elif reason is DropReason.ARENA_FULL:
            self._notices.warn(
                reason.value,
                "the arena of %d bytes is full because the daemon is slower than the job, or absent; %s. Raise "
                "CAPD_ARENA_BYTES, capture less, or set CAPD_POLICY=block",
                refused.capacity,
                self._policy,
            )

    def ring_full(self, capacity: int) -> None:
        """Report that a device's snapshot ring of `capacity` bytes had no room."""
        self._notices.warn(
            DropReason.RING_FULL.value,
            "the device ring of %d bytes is full; %s. Set CAPD_RING=wait, raise CAPD_RING_BYTES, or capture fewer "
            "tensors per step",
            capacity,
            self._policy,
        )

    def too_large_for_ring(self, definition: Definition, nbytes: int, capacity: int) -> None:
        """Report a capture that can never fit into a device ring of this size."""
        self._notices.warn(
            DropReason.TOO_LARGE.value,
            "%s is not captured: its %d bytes exceed the device ring of %d bytes; CAPD_POLICY=block sends it in parts",
            definition.key.tensor_name,
            nbytes,
            capacity,
        )

    def reduced(self, nbytes: int) -> None:
        """Report that policy stats kept only the statistics of a tensor of `nbytes`."""
        self._notices.warn(
            "reduced",
            "there was no room for a tensor of %d bytes; policy stats kept its statistics. "
            "Raise CAPD_ARENA_BYTES or CAPD_MAX_MB_PER_STEP, or capture less, to keep tensors",
            nbytes,
        )

    def end_of_parts(self, record: Record, part_nbytes: int) -> None:
        """Report a record in parts that was given up for lack of room. Called at the end of every such record."""
        if record.dropped in (DropReason.ARENA_FULL, DropReason.RING_FULL):
            self._notices.warn(
                "gave_up",
                "a tensor of %d bytes, sent in parts of up to %d, was given up after a wait of max_block_ms for room: "
                "the daemon is slower than that, or absent. Raise CAPD_MAX_BLOCK_MS or CAPD_ARENA_BYTES",
                record.descriptor.nbytes,
                part_nbytes,
            )
