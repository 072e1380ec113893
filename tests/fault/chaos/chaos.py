"""Four ranks that train and capture, one daemon, and random faults of either side every few seconds.

The ranks capture in every mode and policy, some of it in parts or cut, some of it as statistics alone. Faults
overlap: what was killed is started again, and what was stopped goes on, a random time later, whatever else has
happened by then. Ranks come back as under torchrun, with the next attempt. `tests.fault.chaos.chaos_judge` says
afterwards whether the promises were kept; the runner only acts, and writes down when it did what.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fault.chaos.chaos_rank import RANKS
from tests.fault.kit.load import Gone
from tests.fault.kit.site import Site
from tests.kit.processes import live_stats, until

__all__ = ["Chaos", "Life", "Usage"]

SCRIPT = Path(__file__).with_name("chaos_rank.py")
WAYS: tuple[dict[str, str], ...] = (  # of capturing; the next attempt of a rank takes the next one
    {"CAPD_POLICY": "drop"},
    {"CAPD_POLICY": "block"},
    {"CAPD_POLICY": "block", "CAPD_MODE": "stats"},
    {"CAPD_POLICY": "stats"},
    {"CAPD_POLICY": "thin"},
    {"CAPD_POLICY": "block", "CAPD_MODE": "sample:1/3"},
)
PAUSES_S = (0.5, 4.5)  # between two faults
TICK_S = 0.1
START_S = 120.0  # for all ranks to have taken a step: what comes before it says nothing
LEAVE_S = 150.0  # for the ranks to flush and end when all is over


@dataclass
class Life:
    """One attempt of a rank: its process, its files, and what was done to it. Times are monotonic seconds."""

    rank: int
    attempt: int
    process: subprocess.Popen[bytes]
    log: Path
    said: Path
    began: float = field(default_factory=time.monotonic)
    stopped: list[tuple[float, float]] = field(default_factory=list)  # SIGSTOP … SIGCONT
    killed_at: float | None = None


@dataclass
class Usage:
    """The most of each that was seen."""

    nbytes: int = 0  # RssAnon
    descriptors: int = 0
    threads: int = 0

    def sample(self, pid: int) -> None:
        """Look at a process; one that just ended has nothing."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return
        values = dict(line.split(":", 1) for line in status.splitlines())
        self.nbytes = max(self.nbytes, int(values.get("RssAnon", "0").split()[0]) << 10)
        self.descriptors = max(self.descriptors, descriptors)
        self.threads = max(self.threads, int(values["Threads"]))


class Chaos:
    """Starts everything; `run` for a time, `end` in order, `close` by any means."""

    def __init__(self, site: Site, directory: Path, seed: str) -> None:
        self.site = site
        self.faults: Counter[str] = Counter()
        self.daemon_usage, self.rank_usage = Usage(), Usage()
        self.lives: list[Life] = []
        self.daemon_killed: list[float] = []
        self.daemon_away: list[tuple[float, float]] = []  # from a kill, stop or end until it answers again
        self.daemon_blind: list[tuple[float, float]] = []  # the same until it has admitted a rank
        self._directory = directory
        self._stop_file = directory / "stop"
        self._random = random.Random(seed)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._away_since: float | None = None
        self._blind_since: float | None = None
        self._ending = False

    # The course of events

    def run(self, seconds: float) -> None:
        """Start daemon and ranks, then let faults rain for `seconds`."""
        assert self.site.start(), self.site.says()
        for rank in range(RANKS):
            self._start_rank(rank, 0)
        until(lambda: all(b'"step"' in _content(life.log) for life in self.lives), START_S)
        over = time.monotonic() + seconds
        next_fault = time.monotonic() + self._random.uniform(*PAUSES_S)
        while time.monotonic() < over:
            self._look()
            if time.monotonic() >= next_fault:
                self._strike()
                next_fault = time.monotonic() + self._random.uniform(*PAUSES_S)
            threading.Event().wait(TICK_S)

    def end(self) -> None:
        """No faults any more: whatever is away comes back, the ranks leave in order, then the daemon."""
        while self._later or self._away_since is not None or self._blind_since is not None:
            self._look()
            threading.Event().wait(TICK_S)
        # A rank whose last try to connect failed leaves without a wait, so one that starts late must be there first.
        until(lambda: {life.process.pid for life in self.alive()} <= self._connected(), START_S)
        self._stop_file.touch()
        for life in self.alive():
            assert life.process.wait(LEAVE_S) == 0, life.said.read_text()
        maps = Path(f"/proc/{self._daemon_pid}/maps")
        until(lambda: "memfd:capd" not in maps.read_text(), 30.0)
        assert self.site.stop(120.0) == 0, self.site.says()

    def close(self) -> None:
        """Kill what is left of the ranks; the daemon is the site's."""
        for life in self.lives:
            life.process.kill()
            life.process.wait(30)

    def alive(self) -> list[Life]:
        """The newest attempt of each rank, where it was not killed."""
        return [life for life in self.lives if life.killed_at is None]

    def _look(self) -> None:
        """Do what is due, see who has come back, and that nobody has gone by itself."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        for life in self.alive():
            code = life.process.poll()
            assert code is None, f"rank {life.rank} ended with {code}\n{life.said.read_text()}"
            self.rank_usage.sample(life.process.pid)
        if not self.site.is_alive():
            self._see_ended_daemon()
        elif not self._ending:
            if self._away_since is not None and "listening on" in self.site.says():
                self.daemon_away.append((self._away_since, time.monotonic()))
                self._away_since = None
            if self._blind_since is not None and "connected to run" in self.site.says():
                self.daemon_blind.append((self._blind_since, time.monotonic()))
                self._blind_since = None
        self.daemon_usage.sample(self._daemon_pid)

    def _see_ended_daemon(self) -> None:
        if self._ending:
            self._ending = False
            assert self.site.ended() == 0, self.site.says()
            self._after(2.0, self._start_daemon)
        else:
            assert self._away_since is not None, f"the daemon ended by itself\n{self.site.says()}"

    # Faults

    def _strike(self) -> None:
        faults: list[tuple[int, Callable[[], None]]] = [
            (5, self._kill_daemon),
            (3, self._stop_daemon),
            (2, self._end_daemon),
            (2, self._seal),
            (4, self._kill_rank),
            (3, self._stop_rank),
            (2, self._terminate_rank),
            (1, self._kill_all_ranks),
            (1, self._kill_both),
            (1, self._stop_both),
        ]
        weights = [weight for weight, _ in faults]
        [(_, fault)] = self._random.choices(faults, weights)
        fault()

    def _note(self, name: str) -> None:
        self.faults[name] += 1

    def _kill_daemon(self) -> None:
        if not self.site.is_alive():
            return
        self._note("daemon SIGKILL")
        self._gone()
        self.daemon_killed.append(time.monotonic())
        self._ending = False
        self.site.kill()
        self._after(3.0, self._start_daemon)

    def _stop_daemon(self) -> None:
        process = self.site.process
        if process is None or not self.site.is_alive():
            return
        self._note("daemon SIGSTOP")
        process.send_signal(signal.SIGSTOP)
        self._after(4.0, lambda: process.poll() is None and process.send_signal(signal.SIGCONT))

    def _end_daemon(self) -> None:
        if self._away_since is not None or not self.site.is_alive():
            return
        self._note("daemon SIGTERM")
        self._gone()
        self._ending = True
        os.kill(self._daemon_pid, signal.SIGTERM)

    def _seal(self) -> None:
        if self._away_since is None and self.site.is_alive() and not self._is_stopped(self._daemon_pid):
            try:
                self.site.seal()
            except (Gone, OSError):
                return
            self._note("seal")

    def _kill_rank(self, signum: int = signal.SIGKILL) -> None:
        if lives := self.alive():
            self._end_rank(self._random.choice(lives), signum)

    def _terminate_rank(self) -> None:
        self._kill_rank(signal.SIGTERM)

    def _stop_rank(self) -> None:
        lives = [life for life in self.alive() if not self._is_stopped(life.process.pid)]
        if not lives:
            return
        life = self._random.choice(lives)
        self._note("rank SIGSTOP")
        began = time.monotonic()
        life.process.send_signal(signal.SIGSTOP)
        self._after(3.0, lambda: self._continue(life, began))

    def _continue(self, life: Life, began: float) -> None:
        if life.killed_at is None:
            life.process.send_signal(signal.SIGCONT)
            life.stopped.append((began, time.monotonic()))

    def _kill_all_ranks(self) -> None:
        for life in self.alive():
            self._end_rank(life, signal.SIGKILL)

    def _kill_both(self) -> None:
        self._kill_daemon()
        self._kill_rank()

    def _stop_both(self) -> None:
        self._stop_daemon()
        self._stop_rank()

    def _end_rank(self, life: Life, signum: int) -> None:
        self._note(f"rank {signal.Signals(signum).name}")
        stopped = self._is_stopped(life.process.pid)
        life.process.send_signal(signum)
        if stopped:
            life.process.send_signal(signal.SIGCONT)  # SIGTERM waits for that
        life.process.wait(30)
        life.killed_at = time.monotonic()
        self._after(1.0, lambda: self._start_rank(life.rank, life.attempt + 1))

    # Inside

    @property
    def _daemon_pid(self) -> int:
        assert self.site.process is not None
        return self.site.process.pid

    def _connected(self) -> set[int]:
        sessions = live_stats(f"unix:{self.site.socket}")["sessions"]
        return {session["pid"] for session in sessions if session["connected"]}

    def _gone(self) -> None:
        now = time.monotonic()
        self._away_since = self._away_since or now
        self._blind_since = self._blind_since or now

    def _after(self, longest_s: float, act: Callable[[], object]) -> None:
        at = time.monotonic() + self._random.uniform(0.0, longest_s)
        heapq.heappush(self._later, (at, next(self._order), lambda: act() and None))

    def _start_daemon(self) -> None:
        self.site.start_unwatched()

    def _start_rank(self, rank: int, attempt: int) -> None:
        name = f"rank{rank}-{attempt}"
        log, said = self._directory / f"{name}.jsonl", self._directory / f"{name}.log"
        env = {
            **os.environ,
            "CAPD_ENDPOINT": f"unix:{self.site.socket}",
            "CAPD_RUN_ID": "run",
            "CAPD_ARENA_BYTES": str(3 << 20),
            **WAYS[(rank + attempt) % len(WAYS)],
            "CAPD_MAX_BLOCK_MS": "1000",
            "CAPD_PING_S": "0.5",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "PYTHONPATH": str(SCRIPT.parents[3]),
        }
        command = [sys.executable, str(SCRIPT), str(log), str(self._stop_file)]
        with said.open("ab") as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        self.lives.append(Life(rank, attempt, process, log, said))

    @staticmethod
    def _is_stopped(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False


def _content(log: Path) -> bytes:
    return log.read_bytes() if log.exists() else b""
