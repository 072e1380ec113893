"""What a store can be told: the constants of one daemon's writing, fixed when it starts."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Literal

__all__ = ["StoreOptions", "open_files_within"]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Settings of the shard writer; sizes in bytes.

    codec: "auto" (the best of a few on a series' first record), "default" or "fast" (by dtype), or an explicit name,
    "none" among them (`capd.store.format.codecs`); fixed per series.
    statistics: compute them for every record. shard_nbytes: raw bytes at which a shard counts as full.
    log_nbytes: size at which a small-record log is rotated. open_files: shard files kept open at once.
    durability: "buffered" (acknowledged = handed to the kernel) or "durable" (synced before the ack).
    """

    codec: str = "auto"
    statistics: bool = True
    shard_nbytes: int = 512 << 20
    log_nbytes: int = 64 << 20
    open_files: int = 512
    durability: Literal["buffered", "durable"] = "buffered"


def open_files_within(limit: int) -> int:
    """How many shard files to keep open under a limit of open files: half of it is left to everything else."""
    most = StoreOptions().open_files
    return most if limit == resource.RLIM_INFINITY else max(8, min(most, limit // 2))
