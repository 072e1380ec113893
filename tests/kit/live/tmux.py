"""A real terminal for tests: a command in a tmux of its own, its keys, its size and what its screen shows."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

__all__ = ["Tmux"]

PATIENCE_S = 60.0


class Tmux:
    """A command on a terminal of tmux, whose server ends with the context. After it, the screen shows `EXIT CODE`."""

    def __init__(
        self, directory: Path, command: Sequence[str], *, columns: int, rows: int, **environ: str
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("tmux is not installed")
        self._socket = directory / f"tmux-{columns}"
        words = " ".join(map(shlex.quote, command))
        kept = {name: value for name, value in os.environ.items() if name not in ("TMUX", "COLUMNS", "LINES")}
        # The shell stays, so that the last screen can be read.
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows),
            f"{words}; echo EXIT $?; exec sleep 600",
            env={**kept, "LC_ALL": "C.UTF-8", **environ},
        )  # fmt: skip

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *_: object) -> None:
        self._tmux("kill-server")

    @property
    def screen(self) -> str:
        """What the terminal shows."""
        return self._tmux("capture-pane", "-p")

    @property
    def coloured(self) -> str:
        """What the terminal shows, with its styles as escape sequences."""
        return self._tmux("capture-pane", "-p", "-e")

    @property
    def in_alternate_screen(self) -> bool:
        """Whether a command draws on the whole screen."""
        return self._tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    def type(self, *keys: str) -> None:
        """Press keys, each by its name in tmux."""
        for key in keys:
            self._tmux("send-keys", key)

    def resize(self, columns: int, rows: int) -> None:
        """Give the terminal another size."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def until(self, condition: Callable[[str], object], what: str) -> str:
        """Return the screen once it fulfils a condition."""
        end = time.monotonic() + PATIENCE_S
        while not condition(shown := self.screen):
            assert time.monotonic() < end, f"{what}:\n{shown}"
            time.sleep(0.05)
        return shown

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, "-u", *words],
            capture_output=True,
            text=True,
            env=env,
            check=False,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
