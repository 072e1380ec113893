"""Real daemons and real ranks as processes, with the signals that tests send them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kit import forking

RANK_JOB = Path(__file__).parent / "jobs" / "rank_job.py"


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`; fails at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        threading.Event().wait(0.005)
    return value


def pause(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process stands still: until then it may go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: set(_states(pid)) <= {"T"})


def _states(pid: int) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


class Daemon:
    """`python -m capd serve` on a store, below the command `prefix`; killed with the test if it is still there."""

    def __init__(self, store: Path, runtime: Path, *options: str, prefix: tuple[str, ...] = ()) -> None:
        self.store = store
        self.socket = runtime / "capd.sock"
        self.endpoint = f"unix:{self.socket}"
        self.log = runtime / "daemon.log"
        self._options = options
        self._prefix = prefix
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Daemon:
        """Start it and wait until it listens."""
        seen = len(self.output())
        command = [
            *self._prefix,
            sys.executable,
            "-m",
            "capd",
            "serve",
            "--store",
            str(self.store),
            "--endpoint",
            self.endpoint,
        ]
        with self.log.open("ab") as log:
            self.process = forking.popen([*command, *self._options], stderr=log, stdout=log)
        process = self.process
        until(lambda: "listening on" in self.output()[seen:] or process.poll() is not None)
        assert process.poll() is None, self.output()
        return self

    def output(self) -> str:
        """Everything it said so far."""
        return self.log.read_text() if self.log.exists() else ""

    def send(self, signum: int) -> None:
        """Send a signal; the daemon stands still when a SIGSTOP was sent."""
        assert self.process is not None
        if signum == signal.SIGSTOP:
            pause(self.process.pid)
        else:
            self.process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(30)

    def stop(self) -> str:
        """SIGTERM; it must drain, seal and end with 0. Returns what it said."""
        self.send(signal.SIGTERM)
        assert self.process is not None
        assert self.process.wait(60) == 0, self.output()
        return self.output()

    def discard(self) -> None:
        """End it by any means."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(30)

    def anonymous_nbytes(self) -> int:
        """RssAnon of the process."""
        assert self.process is not None
        return anonymous_nbytes(self.process.pid)


def anonymous_nbytes(pid: int) -> int:
    """RssAnon of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc status")


def command_line(pid: int | str) -> list[bytes]:
    """The words a process was started with; none of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def command_lines() -> dict[int, list[bytes]]:
    """Those of every process, by its id."""
    return {int(name): command_line(name) for name in os.listdir("/proc") if name.isdigit()}


def is_running(pid: int) -> bool:
    """Not gone, and not only waiting for somebody to collect its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def daemons_on(store: Path) -> list[int]:
    """Processes whose command line names the store."""
    return [
        pid for pid, words in command_lines().items() if b"serve" in words and os.fsencode(store) in words
    ]


class Told:
    """A process that is told what to do line by line, and answers with JSON."""

    process: subprocess.Popen[str]

    def tell(self, command: str) -> None:
        """Send a command without waiting for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (
            f"it ended with {self.process.wait(10)}: {self.process.stderr and self.process.stderr.read()}"
        )
        return json.loads(line)

    def ask(self, command: str) -> Any:
        """Send a command and wait for its answer."""
        self.tell(command)
        return self.hear()


class Rank(Told):
    """A rank as its own process (rank_job.py, or `command`), told what to do line by line."""

    def __init__(
        self,
        endpoint: str,
        rank: int = 0,
        *,
        run_id: str = "run",
        command: tuple[str, ...] = (sys.executable, str(RANK_JOB)),
        imports: str = "",
        stderr: Any = None,
        **environment: str,
    ) -> None:
        env = {
            **os.environ,
            "CAPD_ENDPOINT": endpoint,
            "CAPD_RUN_ID": run_id,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "CAPD_ARENA_BYTES": str(32 << 20),
            "CAPD_POLICY": "block",
            "CAPD_PING_S": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
            **environment,
        }
        self.rank = rank
        self.process = forking.popen(
            command,
            imports=imports,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            text=True,
        )

    def leave(self) -> None:
        """Let it close and end in order."""
        self.tell("leave")
        assert self.process.wait(60) == 0
        self._close_pipes()

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


StartRank = Callable[..., Rank]


def capd(
    *arguments: str, check: bool = True, inner: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line. inner: of a command that starts a job, what the job imports."""
    done = forking.run(
        [sys.executable, "-m", "capd", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        inner=inner,
    )
    assert not check or done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def at_rest(session: dict[str, Any]) -> bool:
    """Whether a rank is gone for good, and the outcome of everything that it had sent is known."""
    return session["state"] in ("ended", "died") and not session["in_flight"]


def live_stats(endpoint: str) -> dict[str, Any]:
    """Counters of the only run, from the daemon."""
    stats: dict[str, Any] = json.loads(capd("stats", "--json", CAPD_ENDPOINT=endpoint).stdout)
    return stats
