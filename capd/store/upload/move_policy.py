"""The policy of `[upload] delete_local`: when an uploaded shard leaves the local disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MovePolicy", "used_fraction"]

# The share of the file system that `at` frees below its mark, so that it need not begin again at once.
_BELOW = 0.05
_LOOK_S = 60.0
_FULL_LOOK_S = 10.0


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """When uploaded shards are moved. Without a value: never.

    Attributes:
        after_s: The age of a shard file from which on it is moved, in seconds.
        at: The used share of the file system from which on the oldest shards are moved.
    """

    after_s: float | None = None
    at: float | None = None

    def __bool__(self) -> bool:
        return self.after_s is not None or self.at is not None

    @property
    def look_s(self) -> float:
        """The time between two looks at what is due, in seconds."""
        # A disk may fill within minutes.
        return _FULL_LOOK_S if self.after_s is None else min(_LOOK_S, max(1.0, self.after_s / 10))

    @property
    def down_to(self) -> float:
        """The used share of the file system at which `at` is content."""
        return max(0.0, (self.at or 0.0) - _BELOW)

    def is_due(self, age_s: float) -> bool:
        """Return whether a shard of this age may be moved."""
        return self.after_s is None or age_s >= self.after_s


def used_fraction(path: Path) -> tuple[float, int]:
    """Return the used share of a file system, as `df` shows it, and the bytes that users may have on it."""
    found = os.statvfs(path)
    used = found.f_blocks - found.f_bfree
    total = used + found.f_bavail
    return used / max(1, total), total * found.f_frsize
