"""What a Python process of a job is to do about models, and what it tells `capd run` about itself."""

from __future__ import annotations

import os

__all__ = ["emulates", "note", "watches"]


def watches() -> bool:
    """Whether models that are found are captured, as far as the environment says."""
    return os.environ.get("CAPD_WATCH", "").strip().lower() != "off"


def emulates() -> bool:
    """Whether models that are found are to compute in another number format."""
    return os.environ.get("CAPD_EMULATE", "").strip().lower() not in ("", "none", "off")


def note(what: str) -> None:
    """Tell `capd run` how far this process came, for the case that nothing is captured."""
    path = os.environ.get("CAPD_RUN_NOTES")
    if not path:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return  # the job outlives its `capd run`, or runs elsewhere
    try:
        if what != "python" or os.fstat(file).st_size == 0:  # one of thousands of processes is enough
            os.write(file, what.replace("\n", " ")[:4000].encode() + b"\n")
    except OSError:
        pass
    finally:
        os.close(file)
