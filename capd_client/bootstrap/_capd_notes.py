"""The orders for a Python process of a job, and its notes to `capd run`."""

from __future__ import annotations

import os
import sys

__all__ = ["emulates", "note", "watches"]


def watches() -> bool:
    """Whether the environment allows that found models are captured."""
    return os.environ.get("CAPD_WATCH", "").strip().lower() not in ("0", "false", "no", "off")


def emulates() -> bool:
    """Whether found models compute in another number format."""
    return os.environ.get("CAPD_EMULATE", "").strip().lower() not in ("", "none", "off")


def note(what: str) -> None:
    """Note for `capd run` how far this process came, in case nothing is captured."""
    path = os.environ.get("CAPD_RUN_NOTES")
    if not path:
        # A job of CAPD_WATCH=1 has no `capd run` that could say this.
        if what.startswith("problem "):
            _say("capd: nothing is captured: " + what[len("problem ") :] + "\n")
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        # The job outlives its `capd run`, or runs elsewhere.
        return
    try:
        # "python" from one of thousands of processes is enough.
        if what != "python" or os.fstat(file).st_size == 0:
            os.write(file, what.replace("\n", " ")[:4000].encode() + b"\n")
    except OSError:
        pass
    finally:
        os.close(file)


def _say(line: str) -> None:
    # A job may have closed its stderr, or the reader of its pipe may be gone.
    try:
        if sys.stderr is not None:
            sys.stderr.write(line)
    except (OSError, ValueError):
        pass
