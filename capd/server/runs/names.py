"""The names of runs: which are allowed, and which run a rank without a name writes to."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

from capd.errors import ConfigError
from capd.server.runs.root_lock import OwnerNote

__all__ = ["MAX_RUN_ID_CHARS", "RunNames", "check_run_id", "new_run_id"]

MAX_RUN_ID_CHARS = 128
# File names have at most 255 bytes, including `.zarr` and temporary suffixes.
_MAX_RUN_ID_NBYTES = 240


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it can name a directory of the store. Otherwise raise a ConfigError with the reason."""
    problem = None
    if not run_id or not run_id.strip():
        problem = "it is empty"
    elif len(run_id) > MAX_RUN_ID_CHARS or len(run_id.encode(errors="replace")) > _MAX_RUN_ID_NBYTES:
        problem = f"it is longer than {MAX_RUN_ID_CHARS} characters or {_MAX_RUN_ID_NBYTES} bytes"
    elif "/" in run_id or "\\" in run_id:
        problem = "it contains a path separator"
    elif run_id[0] in ".-~" or run_id != run_id.strip():
        problem = "it begins with a dot, dash or tilde, or has blanks at its ends"
    elif any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in run_id):
        problem = "it contains a control character"
    if problem:
        raise ConfigError(f"run id {run_id[:MAX_RUN_ID_CHARS]!r} cannot be used: {problem}; choose another")
    return run_id


def new_run_id(root: Path) -> str:
    """Return a name made from the local time, `YYYYmmdd-HHMMSS`, that no run below `root` has."""
    name = base = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while (root / f"{name}.zarr").exists():
        number += 1
        name = f"{base}-{number}"
    return name


class RunNames:
    """The run of each rank: the name that the rank gives, else the daemon's run id, else one shared assigned name.

    All ranks that overlap share the assigned name, also after the daemon was killed and restarted: `previous` is the
    note of the killed daemon. A rank that has received the name gives it itself from then on. Not thread-safe.
    """

    def __init__(self, root: Path, default: str | None, previous: OwnerNote) -> None:
        self._root = root
        self._default = check_run_id(default) if default is not None else None
        self.assigned = previous.assigned_run

    def resolve(self, wanted: str | None, is_active: Callable[[str], bool]) -> str:
        """Return the run of a rank that gives the name `wanted`. Raises ConfigError if its name is not allowed.

        `is_active` tells whether a run has ranks.
        """
        if wanted is not None:
            return check_run_id(wanted)
        if self._default is not None:
            return self._default
        if not (self.assigned and is_active(self.assigned)):
            self.assigned = new_run_id(self._root)
        return self.assigned
