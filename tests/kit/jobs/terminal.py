"""A terminal for tests: a pseudo terminal of a given size, and a model of what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.kit import forking

__all__ = ["Screen", "Terminal"]

_SEQUENCE = re.compile(r"\x1b\[(\?)?(\d*)([A-Za-z])")


class Screen:
    """What the sequences that capd writes leave on a screen. Unknown ones are errors.

    Attributes:
        scrolled: The rows that went out at the top.
        wraps: Whether text that reaches the right edge goes on in the next row.
    """

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.row = self.column = self.scrolled = 0
        self.wraps = True
        self._cells: list[str] = [""] * rows

    @property
    def lines(self) -> list[str]:
        """The rows with text, without spaces at their ends."""
        shown = [line.rstrip() for line in self._cells]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def resize(self, columns: int, rows: int) -> None:
        """Take another size. As terminals do, rows that no longer fit are wrapped."""
        cut = [line[at : at + columns] for line in self._cells[: self.row + 1]
               for at in range(0, max(1, len(line)), columns)]  # fmt: skip
        self.columns, self.rows = columns, rows
        self._cells = (cut[-rows:] + [""] * rows)[:rows]
        self.row, self.column = min(len(cut), rows) - 1, 0

    def feed(self, text: str) -> None:
        """Show output."""
        at = 0
        while at < len(text):
            match = _SEQUENCE.match(text, at)
            if match:
                self._obey(match[1] or "", match[2], match[3])
                at = match.end()
            else:
                self._put(text[at])
                at += 1

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self._next_row()
        else:
            assert char.isprintable(), repr(char)
            if self.column == self.columns:
                if self.wraps:
                    self._next_row()
                    self.column = 0
                else:
                    self.column -= 1
            line = self._cells[self.row].ljust(self.column)
            self._cells[self.row] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1

    def _next_row(self) -> None:
        if self.row + 1 < self.rows:
            self.row += 1
        else:
            self._cells = [*self._cells[1:], ""]
            self.scrolled += 1

    def _obey(self, private: str, number: str, letter: str) -> None:
        what = f"{private}{letter}"
        if what == "A":
            self.row = max(0, self.row - int(number or 1))
        elif what in ("K", "J") and number in ("", "0"):
            self._cells[self.row] = self._cells[self.row][: self.column]
            if what == "J":
                self._cells[self.row + 1 :] = [""] * (self.rows - self.row - 1)
        elif (what, number) == ("J", "2"):
            self._cells = [""] * self.rows
        elif (what, number) == ("H", ""):
            self.row = self.column = 0
        elif private and number == "7" and letter in "hl":
            self.wraps = letter == "h"
        else:
            assert what == "m", f"unknown sequence: {private}{number}{letter}"


class Terminal:
    """`capd ARGS` on a pseudo terminal, which is its input, output and error output. A context manager."""

    def __init__(
        self, *args: str | Path, columns: int = 80, rows: int = 24, environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.screen, self.text = Screen(columns, rows), ""
        self._ours, theirs = pty.openpty()
        self._set_size(theirs)
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process: subprocess.Popen[Any] = forking.popen(
            [sys.executable, "-m", "capd", *map(str, args)],
            **{"stdin": theirs, "stdout": theirs, "stderr": theirs, **options},
            env={**inherited, "TERM": "xterm", **(environ or {})},
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        os.close(self._ours)

    def until(self, condition: Callable[[list[str]], bool], timeout_s: float = 60.0) -> list[str]:
        """The lines of the screen once they fulfil a condition."""
        end = time.monotonic() + timeout_s
        while not condition(self.screen.lines):
            assert time.monotonic() < end, "\n".join(self.screen.lines)
            assert self.read() or condition(self.screen.lines), "\n".join(self.screen.lines)
        return self.screen.lines

    def read(self) -> bool:
        """Read what comes within a second; returns whether more may come."""
        if not select.select([self._ours], [], [], 1.0)[0]:
            return True
        try:
            piece = os.read(self._ours, 1 << 16).decode()
        except OSError:  # the other end was closed
            return False
        self.text += piece
        self.screen.feed(piece)
        return bool(piece)

    def read_all(self) -> str:
        """Everything that the process writes until its end."""
        while self.read():
            pass
        return self.text.replace("\r\n", "\n")

    def type(self, text: str) -> None:
        """Type on the keyboard."""
        os.write(self._ours, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        self.screen.resize(columns, rows)
        self._set_size(self._ours)
        self.process.send_signal(signal.SIGWINCH)

    def _set_size(self, fd: int) -> None:
        size = struct.pack("HHHH", self.screen.rows, self.screen.columns, 0, 0)
        fcntl.ioctl(fd, termios.TIOCSWINSZ, size)
