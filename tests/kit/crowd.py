"""Many real ranks on one node, cheaply: one process imports torch and forks every rank before it uses capd.

    python -m tests.kit.crowd DIRECTORY       commands on standard input: start RANK PAUSE_S NBYTES | quit

Each rank captures tensors of NBYTES, with PAUSE_S between two of them, until DIRECTORY/stop exists, then flushes, and
leaves its counters in DIRECTORY/<pid>.json with the longest time in which nothing of it was committed, and how often it
connected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from tests.kit import forking
from tests.kit.paths import REPOSITORY


class Crowd:
    """The ranks of one daemon. Ends with `close`, whatever state they are in."""

    def __init__(self, directory: Path, endpoint: str, **environment: str) -> None:
        self.directory = directory
        self.pids: dict[int, int] = {}  # rank → pid of its newest process
        directory.mkdir()
        env = {
            **os.environ,
            "CAPD_ENDPOINT": endpoint,
            "CAPD_RUN_ID": "run",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            **environment,
        }
        self._process = forking.popen(
            [sys.executable, "-m", "tests.kit.crowd", str(directory)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, rank: int, *, pause_s: float = 0.0, nbytes: int = 16 << 10) -> None:
        """One more process for `rank`."""
        self._to.write(f"start {rank} {pause_s} {nbytes}\n")
        self._to.flush()
        assert self._process.stdout is not None
        self.pids[rank] = int(self._process.stdout.readline())

    def finish(self, timeout_s: float = 90.0) -> dict[int, dict[str, Any]]:
        """Let all ranks leave; what each says, by rank."""
        (self.directory / "stop").touch()
        self._to.write("quit\n")
        self._to.close()
        assert self._process.wait(timeout_s) == 0
        reports = [json.loads(path.read_bytes()) for path in self.directory.glob("*.json")]
        return {report["rank"]: report for report in reports}

    def close(self) -> None:
        """Kill what is left."""
        if self._process.poll() is None:
            (self.directory / "stop").touch()
            for pid in self.pids.values():
                _kill(pid)
            self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    @property
    def _to(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        return


def _capture(rank: int, pause_s: float, nbytes: int, directory: Path) -> dict[str, Any]:
    import torch

    import capd_client

    tensor = torch.arange(nbytes // 8)
    stop = directory / "stop"
    committed, since, longest, n = 0, time.monotonic(), 0.0, 0
    while n < 16 or n % 16 or not stop.exists():
        tensor[0] = n
        capd_client.capture(tensor, tensor_name="x", iteration=n)
        n += 1
        if pause_s:
            time.sleep(pause_s)
        now, moment = capd_client.counters()["committed"], time.monotonic()
        if now > committed or not now:  # the time before the first one is the daemon's start
            committed, since = now, moment
        longest = max(longest, moment - since)
    session = capd_client.api.running()
    assert session is not None
    at_stop = capd_client.counters()["committed"]
    flushed = capd_client.flush(60)
    counters = capd_client.counters()
    capd_client.close()
    return {
        "rank": rank, "flushed": flushed, "counters": counters, "at_stop": at_stop, "longest_gap_s": longest,
        "connections": session.transport._connections,
    }  # fmt: skip


def main() -> None:
    import torch  # noqa: F401 - for all ranks at once

    import capd_client.api  # noqa: F401

    directory = Path(sys.argv[1])
    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "quit":
            break
        rank, pause_s, nbytes = int(arguments[0]), float(arguments[1]), int(arguments[2])
        pid = os.fork()
        if pid == 0:
            sys.stdin.close()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            report = _capture(rank, pause_s, nbytes, directory)
            path = directory / f"{os.getpid()}.json"
            path.write_text(json.dumps(report))
            os._exit(0)
        print(pid, flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
