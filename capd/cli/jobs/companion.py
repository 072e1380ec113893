"""The daemon next to a job of `capd run`: a private one that is started and stopped here, or a joined one.

The job comes first. Once the job runs, no failure of the daemon stops it or changes its exit code.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import typer

from capd.cli.output import human_count, human_nbytes, note
from capd.cli.signals import signals_put_off
from capd.config import load_daemon_settings
from capd.drops import describe_drops, left_out, lost
from capd.errors import EndpointError, StoreError
from capd.metrics import DaemonStats, RunStats
from capd.server.net.daemon_client import connect, wait_until_ready
from capd.server.net.endpoint import MAX_PATH_NBYTES, parse
from capd.server.runs.names import check_run_id, new_run_id
from capd.server.runs.unsealed import EXIT_UNSEALED
from capd.store.alerts.file import alerts_of_run
from capd_client.process.text import printable
from capd_client.protocol.control import Control

__all__ = ["Captured", "Companion", "join", "start"]

READY_S = 60.0
# The time after the job until the daemon must have noted that every rank is gone.
REST_S = 10.0
SEAL_S = 600.0
# The time that a daemon may need beyond its shutdown timeout.
STOP_MARGIN_S = 30.0
Captured = Literal["tensors", "scalars", "nothing"]
_SOCKET_NAME = "capd.sock"
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@dataclass(eq=False)
class Companion:
    """The daemon that a job captures into. A context manager; leaving it ends a private daemon.

    Attributes:
        endpoint: The daemon's endpoint.
        run_id: The run that the job captures into.
        store: The root of the store, None if it is unknown.
        absent: Whether no daemon answered at the start. A note has said so.
        process: The private daemon, None for a joined one.
        directory: The directory of the private daemon's socket.
        stop_s: The time that the private daemon may take to end.
    """

    endpoint: str
    run_id: str | None
    store: Path | None
    absent: bool = False
    process: subprocess.Popen[bytes] | None = None
    directory: Path | None = None
    stop_s: float = STOP_MARGIN_S

    def __enter__(self) -> Companion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self._stop(self.process)
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def path(self) -> Path | None:
        """The run that the job captures into, None if it is unknown."""
        return self.store / f"{self.run_id}.zarr" if self.store and self.run_id else None

    def finish(self, why_nothing: Callable[[bool], str]) -> Captured:
        """Finish after the job: wait until its ranks are accounted for, seal its run and print the summary.

        Args:
            why_nothing: Says why nothing was captured; its argument is whether some rank was connected.

        Returns:
            The captures that there are, as far as is known.
        """
        self.wake()
        try:
            stats = self._seal()
        except EndpointError as error:
            if not self.absent:
                note(self._lost(error))
            return "tensors" if self.path is not None and self.path.is_dir() else "nothing"
        run = next((run for run in stats.runs if run.run_id == self.run_id), None)
        for line in [] if run is None else summary(run):
            note(line)
        if run is None or not run.offered:
            note(f"nothing was captured: {why_nothing(run is not None)}")
        if run is None or not run.records:
            return "nothing"
        return "tensors" if run.records > run.scalar_records else "scalars"

    def wake(self) -> None:
        """Continue a private daemon if it was stopped (SIGSTOP), because it holds captures."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def _seal(self) -> DaemonStats:
        with connect(parse(self.endpoint)) as tool:
            until = time.monotonic() + REST_S
            while True:
                stats = tool.stats(self.run_id)
                alive = any(session.state == "live" for run in stats.runs for session in run.sessions)
                if not (alive or stats.arriving) or time.monotonic() > until:
                    break
                time.sleep(0.05)
            if not stats.runs or self.run_id is None:
                return stats
            reply = tool.control(Control("seal", self.run_id), SEAL_S)
            if not reply.ok:
                note(f"the daemon could not seal the run: {reply.message}")
            return tool.stats(self.run_id)

    def _lost(self, error: EndpointError) -> str:
        if self.process is not None and self.process.poll() is not None:
            return (
                f"the daemon ended before the job (exit code {self.process.returncode}); later captures were "
                f"not kept; `capd serve --store {self.store}` seals the records that it had acknowledged"
            )
        return f"no summary: {error}"

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        self.wake()
        try:
            process.wait(self.stop_s)
        except subprocess.TimeoutExpired:
            note(
                f"the daemon (pid {process.pid}) does not stop and is killed; the next `capd serve` seals the rest"
            )
            process.kill()
            process.wait()


def join(endpoint: str, run_id: str | None) -> Companion:
    """Join the daemon at `endpoint`. If it does not answer, a note says so, and the job runs without capture."""
    if run_id is not None:
        check_run_id(run_id)
    try:
        with connect(parse(endpoint)) as tool:
            store = Path(tool.stats().store)
    except EndpointError as error:
        note(f"{error}; the job runs without capture until a daemon is there")
        return Companion(endpoint, run_id, None, absent=True)
    return Companion(endpoint, run_id or new_run_id(store), store)


def start(store: Path, run_id: str | None, config: Path | None) -> Companion:
    """Start a private daemon on `store` and wait until it answers. Without a `run_id`, the run is a new one.

    Raises:
        typer.Exit: If the daemon refuses to start, with the daemon's exit code. Its message is on stderr. The job
            must not be started.
    """
    store = store.absolute()
    run_id = check_run_id(run_id) if run_id is not None else new_run_id(store)
    settings = load_daemon_settings({"store": store, "run_id": run_id}, path=config)
    companion = Companion("", run_id, store, stop_s=settings.shutdown_timeout_s + STOP_MARGIN_S)
    try:
        # A signal before the assignments would leave a directory or a daemon that nobody ends.
        with signals_put_off(_ENDING):
            companion.directory = _socket_directory()
            companion.endpoint = f"unix:{companion.directory / _SOCKET_NAME}"
            command = [sys.executable, "-m", "capd", "serve", "--quiet", "--parent", str(os.getpid())]
            command += ["--store", str(store), "--endpoint", companion.endpoint, "--run-id", run_id]
            command += ["--config", str(config)] if config else []
            # The daemon gets its own session: the terminal's Ctrl-C is for the job, and the daemon drains after it.
            companion.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        _wait_ready(companion, companion.process)
    except BaseException:
        companion.__exit__(None, None, None)
        raise
    return companion


def _wait_ready(companion: Companion, process: subprocess.Popen[bytes]) -> None:
    problem = wait_until_ready(parse(companion.endpoint), lambda: process.poll() is not None, READY_S)
    if problem is None:
        return
    code = process.poll()
    if code is None:
        note(f"the daemon is not ready after {READY_S:.0f} s ({problem}); the job starts without waiting")
        return
    if code > 0 and code != EXIT_UNSEALED:
        note("the daemon did not start, so the job was not started")
        raise typer.Exit(code)
    how = f"ended by signal {-code}" if code < 0 else "stopped while it started"
    note(f"the daemon was {how}; the job runs without capture")


def _socket_directory() -> Path:
    """Create a 0700 directory whose path is short enough for the socket's name."""
    places = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]  # noqa: S108 - 0700 below
    for place in places:
        if os.path.isabs(place) and os.access(place, os.W_OK):
            directory = Path(tempfile.mkdtemp(prefix="capd-run-", dir=place))
            if len(os.fsencode(directory / _SOCKET_NAME)) <= MAX_PATH_NBYTES:
                return directory
            directory.rmdir()
    raise EndpointError(f"no directory for the daemon's socket in any of {places}; set XDG_RUNTIME_DIR")


def summary(run: RunStats) -> list[str]:
    """Return the lines of the summary. If captures were dropped, the first line says so."""
    losses = describe_drops(run.dropped, run.why_full)
    ratio = f", ratio {run.raw_bytes / run.stored_bytes:.2f}" if run.stored_bytes else ""
    dropped, chosen = sum(lost(run.dropped).values()), sum(left_out(run.dropped).values())
    parts = ((run.statistics_records, "statistics alone"), (run.scalar_records, "scalars"))
    of_them = "".join(f", {human_count(count)} of them {what}" for count, what in parts if count)
    lines = [
        *([losses] if losses else []),
        f"{human_count(run.records, 'record')} in {run.path}{of_them}",
        f"{human_nbytes(run.raw_bytes)} raw, {human_nbytes(run.stored_bytes)} stored{ratio}",
        f"offered {human_count(run.offered)}, committed {human_count(run.committed)}, dropped {human_count(dropped)}"
        + (f", left out {human_count(chosen)}" if chosen else ""),
    ]
    for end in sorted({session.end for session in run.sessions if session.killed}):
        ranks = sorted({session.rank for session in run.sessions if session.end == end})
        who = f"ranks {', '.join(map(str, ranks))} were" if len(ranks) > 1 else f"rank {ranks[0]} was"
        lines.append(f"{who} killed by {end}")
    if run.in_flight:
        lines.append(f"{human_count(run.in_flight)} captures are still in flight: a rank is alive")
    with contextlib.suppress(StoreError, OSError):
        if alerts := alerts_of_run(Path(run.path)):
            count = human_count(len(alerts), "alert")
            lines.append(
                f"{count}, the first: {printable(alerts[0].text)}; `capd alerts {run.path}` lists them"
            )
    return lines
