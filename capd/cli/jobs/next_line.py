"""The last line of `capd run`: the commands to type next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from capd.cli.output import note

__all__ = ["note_next"]


def note_next(captures: Path | None, command: Sequence[str], *, has_daemon: bool = True) -> None:
    """Print the commands that read the captures, or that find out why there are none.

    Args:
        captures: The run that the job captured into; None if nothing was captured.
        command: The job, as it was given.
        has_daemon: Whether a daemon was there.
    """
    if captures is None:
        cause = f"capd plan -- {shlex.join(command)}" if has_daemon else "capd serve"
        note(f"next  {cause} · capd doctor --quick")
    else:
        path = shlex.quote(min((str(captures), os.path.relpath(captures)), key=len))
        note(f"next  capd report {path} -o report.html · capd ls {path}")
