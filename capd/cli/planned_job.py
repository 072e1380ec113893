"""The job of `capd plan`: runs in a process group of its own until every rank is planned, then is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

from capd.cli.output import note
from capd_client.planning.seen import RankSeen

__all__ = ["PlannedJob", "documents"]

_LOOK_S = 0.1
_STRAGGLER_S = 30.0  # that a rank may lie behind the first one, or two of its longest steps
END_S = 60.0  # what the job may take to end, torchrun's own grace of 30 s among it
_FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def documents(directory: Path) -> list[RankSeen]:
    """What the processes of the job have left until now; of those of one rank (restarts), all that got farthest."""
    of_rank: dict[int, dict[tuple[bool, bool], list[RankSeen]]] = {}
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            one = msgspec.json.decode(path.read_bytes(), type=RankSeen)
            far = (one.state == "complete", bool(one.series))
            of_rank.setdefault(one.rank, {}).setdefault(far, []).append(one)
    return [one for found in of_rank.values() for one in found[max(found)]]


class PlannedJob:
    """A context manager of the main thread; leaving it ends whatever is left of the job.

    SIGHUP and user signals are passed on to the job. Ctrl-C and SIGTERM end this command, and with it the job.
    """

    def __init__(self, command: Sequence[str], environ: dict[str, str], directory: Path) -> None:
        self._directory = directory
        self._before: dict[signal.Signals, Any] = {}
        stdin = (
            subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        )  # no group of the terminal's
        self._process = subprocess.Popen(command, env=environ, stdin=stdin, stdout=2, process_group=0)

    def __enter__(self) -> PlannedJob:
        for number in _FORWARDED:
            self._before[number] = signal.signal(number, self._pass_on)
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
        finally:
            for number, before in self._before.items():
                signal.signal(number, before)

    def wait(self, timeout_s: float, *, all_nodes: bool) -> int | None:
        """Until every rank is planned, or the job has ended: its exit code, None while it runs.

        all_nodes: the ranks of all nodes are waited for. Returns as well when `timeout_s` are over.
        """
        deadline, first_complete = time.monotonic() + timeout_s, 0.0
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                return code
            seen = documents(self._directory)
            complete = [one for one in seen if one.state == "complete"]
            if complete and not first_complete:
                first_complete = time.monotonic()
            wanted = max((one.world_size if all_nodes else one.local_world_size for one in seen), default=1)
            if len(complete) >= wanted and not any(self._trains(one) for one in seen):
                return None
            if first_complete and time.monotonic() - first_complete > _patience(complete):
                return None
            time.sleep(_LOOK_S)
        return self._process.poll()

    def _end(self) -> None:
        """SIGTERM to the job's group; SIGKILL to what does not end, workers in groups of their own among it.

        A job that has ended by itself is left alone, with whatever it means to leave behind.
        """
        process = self._process
        if process.poll() is not None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        if process.poll() is None:
            note(f"the job did not end within {END_S:g} s of SIGTERM and is killed")
            process.kill()
            process.wait()
        self._signal(signal.SIGKILL)
        for seen in documents(self._directory):
            if self._is_alive(seen):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seen.pid, signal.SIGKILL)

    def _trains(self, one: RankSeen) -> bool:
        """Whether a rank is still to be waited for."""
        return one.state == "running" and (one.host != socket.gethostname() or self._is_alive(one))

    def _is_alive(self, one: RankSeen) -> bool:
        """Whether this process is there and is one of the job's: its environment names the directory."""
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{one.pid}/environ").read_bytes().split(b"\0")
            return os.fsencode(f"CAPD_PLAN={self._directory}") in variables
        return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._signal(number)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _patience(complete: Sequence[RankSeen]) -> float:
    longest = max((i.seconds or 0.0 for one in complete for i in one.iterations), default=0.0)
    return max(_STRAGGLER_S, 2 * longest)
