"""A rank that captures, notes outside of itself what `capture()` has returned for, and ends without goodbye.

    python ending_job.py COUNT HOW NOTES

HOW: `exit` (os._exit), `abort`, `kill` (SIGKILL to itself), `exec` (another program in its process), `memory` (takes
memory until it is killed), `wait` (for somebody else to kill it). NOTES: a file; one line for every capture.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import capd_client
from tests.kit import content


def run(rank: int, count: int, how: str, notes: str) -> None:
    """Capture `count` tensors, or go on until the end comes, and end."""
    log = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    held = []
    n = 0
    while n < count or how == "memory":
        capd_client.capture(content.tensor(rank, n), tensor_name=content.name(n), iteration=n)
        os.write(log, b"%d\n" % n)
        n += 1
        if how == "memory" and n > count:
            held.append(b"\1" * (1 << 20))
    end(how)


def end(how: str) -> None:
    """End at once, in this way."""
    if how == "exit":
        os._exit(0)
    elif how == "abort":
        os.abort()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exec":
        os.execv("/bin/true", ["true"])  # noqa: S606 - the point
    threading.Event().wait()


if __name__ == "__main__":
    run(int(os.environ.get("RANK", "0")), int(sys.argv[1]), sys.argv[2], sys.argv[3])
