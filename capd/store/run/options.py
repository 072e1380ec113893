"""The options of a store: constants for all writing of one daemon, fixed when it starts."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Literal

from capd.store.run.usage import Quota

__all__ = ["StoreOptions", "open_files_within"]


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The settings of the shard writer; sizes in bytes.

    Attributes:
        codec: "auto" (the best of a few on a series' first record), "default" or "fast" (by dtype), or an explicit
            name such as "none" (`capd.store.format.codecs`). A series keeps its codec.
        statistics: Whether to compute statistics for every record.
        shard_nbytes: The raw bytes at which a shard counts as full.
        log_nbytes: The size at which a small-record log is rotated.
        open_files: The number of shard files kept open at once.
        durability: "buffered" (acknowledged when the kernel has the data) or "durable" (synced before the
            acknowledgement).
        quota: The limits of each run.
    """

    codec: str = "auto"
    statistics: bool = True
    shard_nbytes: int = 512 << 20
    log_nbytes: int = 64 << 20
    open_files: int = 512
    durability: Literal["buffered", "durable"] = "buffered"
    quota: Quota = field(default_factory=Quota)


def open_files_within(limit: int) -> int:
    """Return how many shard files to keep open under a limit of open files. At least half is left for other files."""
    most = StoreOptions().open_files
    return most if limit == resource.RLIM_INFINITY else max(8, min(most, limit // 2))
