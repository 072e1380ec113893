"""The last line of `capd run`: the commands to type next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from capd.cli.output import note

__all__ = ["note_next"]


def note_next(
    captures: Path | None, command: Sequence[str], *, has_daemon: bool = True, has_tensors: bool = True
) -> None:
    """Print the commands that read the captures, or that find out why there are none.

    Args:
        captures: The run that the job captured into; None if nothing was captured.
        command: The job, as it was given.
        has_daemon: Whether a daemon was there.
        has_tensors: Whether more than scalars was captured.
    """
    if captures is None:
        cause = f"capd plan -- {shlex.join(command)}" if has_daemon else "capd serve"
        note(f"next  {cause} · capd doctor --quick")
        return
    path = shlex.quote(_shortest(captures))
    report = f"capd report {path} -o report.html · " if has_tensors else ""
    note(f"next  {report}capd ls {path}")


def _shortest(path: Path) -> str:
    # The job may have removed its directory.
    with suppress(OSError):
        return min((str(path), os.path.relpath(path)), key=len)
    return str(path)
