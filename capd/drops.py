"""The drops as summaries explain them: lost, with the setting to raise, or left out by choice; and the list of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key

if TYPE_CHECKING:
    from capd.store.catalog.rows import SessionRow

__all__ = ["REMEDIES", "REQUESTED", "describe_drops", "drops_of", "left_out", "lost"]

REMEDIES: dict[str, str] = {
    DropReason.ARENA_FULL.value: "raise CAPD_ARENA_BYTES, or wait for room: CAPD_POLICY=block, CAPD_MAX_BLOCK_MS",
    DropReason.RING_FULL.value: "capture fewer tensors per step, or wait for room with CAPD_POLICY=block",
    DropReason.TOO_LARGE.value: "raise CAPD_ARENA_BYTES above the largest tensor, or set CAPD_POLICY=block",
    DropReason.UNSUPPORTED.value: "complex, sparse, meta or quantised tensors; the job's log names one",
    DropReason.INVALID_KEY.value: "change the arguments of capture(); the job's log names the problem",
    DropReason.INTERNAL.value: "an error inside capd; the job's log names it",
    DropReason.NOT_CONNECTED.value: "raise CAPD_EXIT_TIMEOUT_S, and keep the daemon up until the job ends",
    DropReason.REJECTED.value: "the daemon refused the session; the job's log has the reason",
    DropReason.BAD_DESCRIPTOR.value: "job and daemon disagree; run the same capd version on both sides",
    DropReason.DISK_FULL.value: "by max_disk, keep_free or the disk itself, as the job's log reports: raise "
    "CAPD_MAX_DISK (--max-disk), lower CAPD_KEEP_FREE (--keep-free), or make room",
    DropReason.STORE_ERROR.value: "the daemon's log names the error",
    DropReason.RANK_DIED.value: "the rank ended before these were complete in its arena, or without a daemon",
    DropReason.STREAM_CAPTURE.value: "a CUDA graph was being captured; take its tensors with capd_client.static_tap",
    DropReason.MUTATED.value: "capture them without immutable=True, or do not change them until flush()",
    DropReason.PARTS_LOST.value: "the daemon was restarted during the transfer of a tensor larger than the arena",
    DropReason.STEP_BUDGET.value: "raise CAPD_MAX_MB_PER_STEP, or capture fewer tensors per step",
    DropReason.THINNED.value: "policy thin: raise the setting for arena_full, ring_full or step_budget",
    DropReason.QUOTA.value: "a quota of the run is used up, as the job's log reports: raise CAPD_RUN_MAX, "
    "CAPD_RANK_MAX or CAPD_SERIES_MAX ([quota] in capd.toml), or write to another run",
    DropReason.INTERRUPTED.value: "a signal handler of the job (a time limit, Ctrl-C) interrupted them",
}

REQUESTED = frozenset({DropReason.SAMPLED.value, DropReason.STOPPED.value, DropReason.EXPIRED.value})
"""The reasons that the user asked for. Summaries report them as left out, not as lost."""


def lost(dropped: Mapping[str, int]) -> dict[str, int]:
    """Return the drops that nobody asked for, by reason."""
    return {reason: count for reason, count in dropped.items() if count and reason not in REQUESTED}


def left_out(dropped: Mapping[str, int]) -> dict[str, int]:
    """Return the drops that the user's settings ask for, by reason."""
    return {reason: count for reason, count in dropped.items() if count and reason in REQUESTED}


def describe_drops(dropped: Mapping[str, int], why_full: str | None = None) -> str | None:
    """Return one line with the number of lost captures, the reasons and the remedies; None if none was lost.

    Args:
        dropped: The drops by reason.
        why_full: The daemon's message for a full disk, with its remedy, if known.
    """
    remedies = {**REMEDIES, DropReason.DISK_FULL.value: why_full} if why_full else REMEDIES
    reasons = [(count, reason) for reason, count in lost(dropped).items()]
    if not reasons:
        return None
    total = sum(count for count, _ in reasons)
    parts = [
        f"{count:,} {reason} ({remedies.get(reason, 'see the log')})"
        for count, reason in sorted(reasons)[::-1]
    ]
    return f"{total:,} capture{'s were' if total != 1 else ' was'} dropped: " + "; ".join(parts)


# Captures that were dropped before they had a key, or were lost with a killed rank.
_WITHOUT_KEY = {
    "bytes": 0, "first_iteration": None, "last_iteration": None, **dict.fromkeys(Key.__struct_fields__, ""),
    "rank": None, "layer": None, "dtype": "",
}  # fmt: skip


def drops_of(sessions: Iterable[SessionRow]) -> list[dict[str, Any]]:
    """Return the drops of each key and dtype for each reason, the most frequent first and chosen ones last.

    A drop has the reason, the count, the bytes as far as they were known, the first and last iteration, the fields of
    the key, and the dtype. Drops without a key have rank None. The counts add up to the sessions' counters.
    """
    found: dict[object, dict[str, Any]] = {}
    keyless: Counter[str] = Counter()
    for session in sessions:
        keyless.update(session.dropped)
        for row in session.drops:
            keyless[row.reason] -= row.count
            new = {"reason": row.reason, "count": 0, **_WITHOUT_KEY, "dtype": row.dtype,
                   "first_iteration": row.first_iteration, "last_iteration": row.last_iteration}  # fmt: skip
            drop = found.setdefault((row.key, row.dtype, row.reason), new | msgspec.structs.asdict(row.key))
            drop["count"] += row.count
            drop["bytes"] += row.nbytes
            drop["first_iteration"] = min(drop["first_iteration"], row.first_iteration)
            drop["last_iteration"] = max(drop["last_iteration"], row.last_iteration)
    drops = list(found.values())
    drops += [
        {"reason": reason, "count": count, **_WITHOUT_KEY} for reason, count in keyless.items() if count > 0
    ]
    return sorted(
        drops, key=lambda drop: (drop["reason"] in REQUESTED, -drop["count"], drop["reason"], str(drop))
    )
