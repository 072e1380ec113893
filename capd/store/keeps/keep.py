"""One keep of the flight recorder, and its line in the file of a node."""

from __future__ import annotations

import msgspec

__all__ = ["MAX_LINE_NBYTES", "Keep", "keep_line", "keep_of"]

MAX_LINE_NBYTES = 4096
_MAX_REASON_CHARS = 500
_MAX_ITERATION = 1 << 53


class Keep(msgspec.Struct, frozen=True):
    """A keep: why, the iteration that asked, the first and the last that are kept, and the node that asked."""

    time_ns: int
    reason: str
    attempt: int
    iteration: int
    first: int
    last: int
    node: str

    @property
    def is_sound(self) -> bool:
        """Whether its numbers can be believed."""
        numbers = self.attempt, self.iteration, self.first, self.last
        return (
            all(0 <= one <= _MAX_ITERATION for one in numbers) and self.first <= self.iteration <= self.last
        )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Keep).decode


def keep_line(keep: Keep) -> bytes:
    """Return the line of a keep."""
    return _encode(keep) + b"\n"


def keep_of(line: bytes) -> Keep | None:
    """Return the keep in a line that may come from anybody, without its end; None if it is none."""
    if len(line) > MAX_LINE_NBYTES:
        return None
    try:
        keep = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return keep if keep.is_sound and len(keep.reason) <= _MAX_REASON_CHARS else None
