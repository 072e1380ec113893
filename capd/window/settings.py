"""The settings of the flight recorder: how many iterations it holds, in how many bytes, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "DEFAULT_WINDOW_NBYTES",
    "MAX_WINDOW_ITERATIONS",
    "MIN_WINDOW_NBYTES",
    "WindowSettings",
    "check_memory",
    "settings_for_left",
]

MAX_WINDOW_ITERATIONS = 10_000
MIN_WINDOW_NBYTES = 1 << 20
DEFAULT_WINDOW_NBYTES = 8 << 30
_MEMORY_SHARE = 0.05
# Other processes of the node need /dev/shm, too.
_FREE_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSettings:
    """The table [window] of a capd.toml that has `iterations`.

    Attributes:
        iterations: The newest iterations that are held: K.
        nbytes: The most bytes of held records, in memory and on disk together.
        memory_nbytes: The most of them in memory; None: 5 % of the node's memory.
        directory: The directory of the part on disk; None: in the run.
        post: The iterations that are kept after the one that a keep names; None: as many as `iterations`.
        statistics: An iteration that leaves is committed as statistics, instead of being let go.
    """

    iterations: int
    nbytes: int = DEFAULT_WINDOW_NBYTES
    memory_nbytes: int | None = None
    directory: Path | None = None
    post: int | None = None
    statistics: bool = False

    @property
    def post_iterations(self) -> int:
        """The iterations that are kept after the one that a keep names."""
        return self.iterations if self.post is None else self.post

    def memory_within(self, node_nbytes: int, free_nbytes: int) -> int:
        """Return the bytes that may be held in memory.

        Args:
            node_nbytes: The memory of the node.
            free_nbytes: The bytes that are free in /dev/shm.
        """
        asked = int(node_nbytes * _MEMORY_SHARE) if self.memory_nbytes is None else self.memory_nbytes
        return max(0, min(asked, self.nbytes, int(free_nbytes * _FREE_SHARE)))


def settings_for_left(spans: Iterable[int]) -> WindowSettings | None:
    """Return the settings of a daemon that only takes up what earlier ones held; None if they held nothing.

    spans: for each run with something of a recorder, the number of its held iterations.
    """
    longest = max(spans, default=None)
    if longest is None:
        return None
    return WindowSettings(iterations=min(max(1, longest), MAX_WINDOW_ITERATIONS), memory_nbytes=0)


def check_memory(memory_nbytes: int, nbytes: int) -> None:
    """Raise ValueError if the part in memory is larger than the whole."""
    if memory_nbytes > nbytes:
        raise ValueError(
            f"{memory_nbytes} bytes are more than the {nbytes} of bytes; lower memory, or raise bytes"
        )
