"""A block of lines that is drawn again in its place on the terminal."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

__all__ = ["NO_WRAP", "WRAP", "RedrawnBlock"]

_CLEAR_SCREEN, _CLEAR_REST, _CLEAR_LINE = "\x1b[2J\x1b[H", "\x1b[J", "\x1b[K"
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
# A line takes one row, also if its characters are wider than they count.
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"


class RedrawnBlock:
    """The block on stdout. It leaves the cursor below itself, and the terminal as it was after every drawing."""

    def __init__(self) -> None:
        self._rows = 0
        self._size = (0, 0)

    def draw(self, lines: Sequence[str]) -> None:
        """Draw lines in place of those drawn before. They are cut off where the terminal ends."""
        size = shutil.get_terminal_size()
        # The last row of the terminal is the cursor's: nothing scrolls.
        shown = [_cut(line, size.columns) for line in lines[: max(1, size.lines - 1)]]
        start = f"\x1b[{self._rows}A\r" if self._rows else ""
        if self._rows and size != self._size:
            # A terminal that was resized has wrapped the lines again.
            start = _CLEAR_SCREEN
        body = "".join(f"{line}{_CLEAR_LINE}\n" for line in shown)
        sys.stdout.write(f"{start}{NO_WRAP}{body}{WRAP}{_CLEAR_REST}")
        sys.stdout.flush()
        self._rows, self._size = len(shown), size


def _cut(line: str, width: int) -> str:
    """Return a line of at most this width. Its colours take none."""
    if len(_COLOUR.sub("", line)) <= width:
        return line
    left, parts = width - 1, []
    for at, part in enumerate(_COLOUR.split(line)):
        # Every second part is a colour.
        parts.append(part if at % 2 else part[:left])
        left -= 0 if at % 2 else len(parts[-1])
    return f"{''.join(parts)}…"
