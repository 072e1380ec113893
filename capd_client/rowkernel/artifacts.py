"""The sizes that the kernels of rows are compiled for, and the marks that say which of them Triton's cache holds.

A mark is an empty file beside Triton's own entries. Its name covers what the kernels depend on, so that a job knows
without importing Triton whether loading them would compile anything.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "BLOCK",
    "COLUMNS",
    "ROWS",
    "SEGMENTS",
    "TABLE_FIELDS",
    "WARPS",
    "cache_directory",
    "installed",
    "interpreted",
    "mark_of",
]

BLOCK, WARPS = 4096, 8  # elements that a program has in its registers at once: 16 a thread
SEGMENTS = 512  # of one launch; each program looks its own up among them
TABLE_FIELDS = 5
"""Rows of the table of segments, int64 [TABLE_FIELDS, segments]: address, elements, address of the row, first task,
elements of a task."""
COLUMNS, ROWS = 32, 64  # of the partial rows, merged at once


def installed() -> bool:
    """Whether Triton can be imported; does not import it."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter is switched on, which launches nothing on a device."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "y", "yes")


def cache_directory() -> Path:
    """Where Triton keeps what it compiles, as the environment is now: Inductor changes it when it first runs."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()


def mark_of(target: str, dtype: str) -> Path:
    """The mark of the kernels for `dtype`, a name of torch's, on `target`, see `capd_client.rowkernel.compile`."""
    spec = find_spec("triton")
    origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
    facts = [target, str(origin), str(origin.stat().st_mtime_ns) if origin is not None else ""]
    facts += [Path(__file__).with_name(name).read_text("utf-8") for name in ("artifacts.py", "kernels.py")]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    return cache_directory() / f"capd-rows-{digest}.{dtype}"
