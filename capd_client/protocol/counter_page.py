"""The counter page: what a rank counts, in memory that outlives it. Layout and reasons only; no I/O, no torch.

Page 0 of the arena (PAGE_NBYTES): native-endian u64 words, written by the client only: word 0 COUNTER_MAGIC, 1 offered,
2 acked, 3 in flight (live slots), 4 … 4+len(DropReason) drops by DropReason index, 256 the iterations begun (1 + the
current one; 0 before the first). Slots lie behind it.
"""

from __future__ import annotations

import enum

__all__ = [
    "COUNTER_ACKED", "COUNTER_DROPS", "COUNTER_IN_FLIGHT", "COUNTER_MAGIC", "COUNTER_OFFERED", "COUNTER_STEPS",
    "DROP_REASONS", "PAGE_NBYTES", "DropReason",
]  # fmt: skip

PAGE_NBYTES = 4096
COUNTER_MAGIC = 0x3130_4447_5044_5043  # "CPDPGD01" read as a little-endian u64
COUNTER_OFFERED, COUNTER_ACKED, COUNTER_IN_FLIGHT, COUNTER_DROPS = 1, 2, 3, 4
COUNTER_STEPS = 256  # behind the room for further reasons


class DropReason(enum.Enum):
    """Why a capture was given up. The order is wire format (counter page): append, never reorder."""

    __hash__ = object.__hash__  # Enum's own is Python code, and every drop asks for it twice

    ARENA_FULL = "arena_full"  # the arena had no room (policy drop, or block after max_block_ms)
    RING_FULL = "ring_full"  # the device snapshot ring had no room
    TOO_LARGE = "too_large"  # larger than the arena or the ring can ever hold
    UNSUPPORTED = "unsupported"  # complex, sparse, meta, quantised or unknown dtype
    INVALID_KEY = "invalid_key"  # a name, index or metadata outside the limits
    INTERNAL = "internal"  # an error inside capd in the rank; logged
    NOT_CONNECTED = "not_connected"  # still unacknowledged when the rank closed
    REJECTED = "rejected"  # the daemon refused the session
    BAD_DESCRIPTOR = "bad_descriptor"  # the daemon refused the descriptor
    DISK_FULL = "disk_full"  # max_disk or keep_free reached, or ENOSPC
    STORE_ERROR = "store_error"  # the store could not write the record
    RANK_DIED = (
        "rank_died"  # counted by the daemon: the rank ended, and no daemon found it whole in its arena
    )
    STREAM_CAPTURE = "stream_capture"  # a CUDA graph was being captured
    STEP_BUDGET = "step_budget"  # beyond max_mb_per_step of its iteration
    SAMPLED = "sampled"  # mode sample:1/N does not keep its call
    MUTATED = "mutated"  # declared immutable, and changed before its bytes were copied
    PARTS_LOST = "parts_lost"  # the daemon was restarted amid the parts of a record
    STOPPED = "stopped"  # `capd ctl stop` was in force
    THINNED = "thinned"  # policy thin left out its call, because a buffer had been full
    INTERRUPTED = "interrupted"  # a signal handler of the job raised, or captured, in the middle of a capture


DROP_REASONS: tuple[DropReason, ...] = tuple(DropReason)
