"""Starts ranks that end without goodbye, within milliseconds: each is forked from a process that has torch already.

Told by lines of JSON on its standard input; a rank's process id, or how it ended, is the answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import capd_client.api  # noqa: F401 - what a rank needs is there when it is forked
from tests.integration.ranks import ending_job
from tests.kit import content


def start(rank: int, count: int, how: str, notes: str, group: str) -> int:
    """Fork a rank; `group`: the cgroup that it enters first, or empty."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if group:
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
        os.environ["RANK"] = str(rank)
        ending_job.run(rank, count, how, notes)
    finally:
        os._exit(70)  # only an error comes here


def wait(pid: int) -> int:
    """How it ended: its exit code, or minus the signal's number."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    content.tensor(0, 0)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answer = start(*arguments) if verb == "start" else wait(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
