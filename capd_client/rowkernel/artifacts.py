"""The sizes for which the kernels of rows are compiled, and marks for the kernels that Triton's cache holds.

A mark is an empty file next to Triton's own entries. Its name covers everything on which the kernels depend. A job
can therefore check, without importing Triton, whether loading the kernels would compile anything.
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

# A program holds BLOCK elements in its registers at once: 16 per thread.
BLOCK, WARPS = 4096, 8
# The most segments of one launch. Each program searches them for its own.
SEGMENTS = 512
TABLE_FIELDS = 5
"""Rows of the table of segments, int64 [TABLE_FIELDS, segments]: address, elements, address of the row, first task,
elements of a task."""
# The part of the partial rows that is merged at once.
COLUMNS, ROWS = 32, 64


def installed() -> bool:
    """Whether Triton can be imported; does not import it."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter is switched on, which launches nothing on a device."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "on", "y", "yes")


def cache_directory() -> Path:
    """Return Triton's cache directory by the environment now; Inductor changes it when it first runs."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()


def mark_of(target: str, dtype: str) -> Path:
    """Return the mark of the kernels for `dtype`, torch's name, on `target` (see `capd_client.rowkernel.compile`)."""
    spec = find_spec("triton")
    origin = Path(spec.origin) if spec is not None and spec.origin is not None else None
    facts = [target, str(origin), str(origin.stat().st_mtime_ns) if origin is not None else ""]
    facts += [Path(__file__).with_name(name).read_text("utf-8") for name in ("artifacts.py", "kernels.py")]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    return cache_directory() / f"capd-rows-{digest}.{dtype}"
