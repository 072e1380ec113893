"""The public calls of a training script, in one module."""

from __future__ import annotations

from capd_client.explicit.call import capture
from capd_client.scalars.call import scalar
from capd_client.session.current import (
    close,
    counters,
    flush,
    keep,
    running,
    session,
    session_into,
    set_moment,
)

__all__ = [
    "capture", "close", "counters", "flush", "keep", "running", "scalar", "session", "session_into", "set_moment",
]  # fmt: skip
