"""The counter page of an arena: the counters of a rank, in memory that outlives the rank. No I/O, no torch.

This is page 0 of the arena (PAGE_NBYTES), native-endian u64 words that only the client writes:

    0       COUNTER_MAGIC
    1       captures offered
    2       captures acknowledged
    3       captures in flight (live slots)
    4 …     drops, one word per DropReason, by its index
    256     iterations begun: 1 + the current one, 0 before the first

The journal and the slots follow the page.
"""

from __future__ import annotations

import enum

__all__ = [
    "COUNTER_ACKED", "COUNTER_DROPS", "COUNTER_IN_FLIGHT", "COUNTER_MAGIC", "COUNTER_OFFERED", "COUNTER_STEPS",
    "DROP_REASONS", "PAGE_NBYTES", "DropReason",
]  # fmt: skip

PAGE_NBYTES = 4096
# "CPDPGD01" read as a little-endian u64.
COUNTER_MAGIC = 0x3130_4447_5044_5043
COUNTER_OFFERED, COUNTER_ACKED, COUNTER_IN_FLIGHT, COUNTER_DROPS = 1, 2, 3, 4
# The words before it are left free for more drop reasons.
COUNTER_STEPS = 256


class DropReason(enum.Enum):
    """The reasons for dropping a capture. Their order is wire format (counter page): append, never reorder."""

    # Enum's own hash is Python code, and every drop asks for it twice.
    __hash__ = object.__hash__

    ARENA_FULL = "arena_full"  # the arena had no room (policy drop, or block after max_block_ms)
    RING_FULL = "ring_full"  # the device snapshot ring had no room
    TOO_LARGE = "too_large"  # larger than the arena or the ring can ever hold
    UNSUPPORTED = "unsupported"  # a complex, sparse, meta, quantised or unknown dtype
    INVALID_KEY = "invalid_key"  # a name, index or metadata outside the limits
    INTERNAL = "internal"  # an error inside capd in the rank; logged
    NOT_CONNECTED = "not_connected"  # still unacknowledged when the rank closed
    REJECTED = "rejected"  # the daemon refused the session
    BAD_DESCRIPTOR = "bad_descriptor"  # the daemon refused the descriptor
    DISK_FULL = "disk_full"  # max_disk or keep_free reached, or ENOSPC
    STORE_ERROR = "store_error"  # the store could not write the record
    # The daemon counts this one: the rank ended, and no daemon found the capture intact in the arena.
    RANK_DIED = "rank_died"
    STREAM_CAPTURE = "stream_capture"  # a CUDA graph was being captured
    STEP_BUDGET = "step_budget"  # above max_mb_per_step of its iteration
    SAMPLED = "sampled"  # mode sample:1/N does not keep its call
    MUTATED = "mutated"  # declared immutable, but changed before its bytes were copied
    PARTS_LOST = "parts_lost"  # the daemon restarted between the parts of a record
    STOPPED = "stopped"  # `capd ctl stop` was in force
    THINNED = "thinned"  # policy thin skipped its call, because a buffer had been full
    INTERRUPTED = "interrupted"  # a signal handler of the job raised, or captured, in the middle of a capture
    QUOTA = "quota"  # run_max, rank_max or series_max of the run reached
    # The daemon counts this one: the flight recorder held the capture, and nobody asked for it.
    EXPIRED = "expired"


DROP_REASONS: tuple[DropReason, ...] = tuple(DropReason)
