"""The processes of sessions: whether the rank of a session that has not ended still runs."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from capd.store.catalog.rows import SessionRow

__all__ = ["is_running"]

_TICKS = os.sysconf("SC_CLK_TCK")
# The clock may have been set a little since the session began.
_CLOCK_S = 2.0


def is_running(row: SessionRow) -> bool | None:
    """Return whether the process of a session runs; None if it is on another host, so that nobody here can tell."""
    if row.state != "live":
        return False
    if row.host != socket.gethostname()[:256]:
        return None
    try:
        # The command in parentheses may contain anything, so the fields after its last parenthesis are counted.
        fields = Path(f"/proc/{row.pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        # Field 22 of proc(5) is the start in clock ticks after the boot. A later process has got the number since.
        return boot_s + int(fields[19]) / _TICKS <= row.started_ns / 1e9 + _CLOCK_S
    except (OSError, ValueError, IndexError):
        return False
