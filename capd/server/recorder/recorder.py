"""The flight recorder: holds records in the spool, and commits or expires them one iteration after the other.

    dispatch thread → take (copy, acknowledge) → spool ─┬─ nobody asks → expired
                                                        └─ keep → recorder thread → the ordinary pipeline

One lock guards the windows and the accounts. It is never held while a file is touched.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from capd.metrics import WindowStats
from capd.server.pipeline.jobs import RecordJob, Refusal
from capd.server.pipeline.pipeline import Pipeline
from capd.server.recorder.departures import Departures
from capd.server.recorder.held_run import HeldAccount, HeldHistory, HeldRun
from capd.server.recorder.holding import Holding
from capd.server.recorder.judging import HeldRecordsFeed, Judges
from capd.server.recorder.keeps_file import KeepsFile
from capd.server.recorder.left_records import LeftRecords
from capd.server.recorder.let_go import LetGoLedger
from capd.server.recorder.run_keeps import RunKeeps, make_keep
from capd.server.recorder.spool import HeldFiles
from capd.server.recorder.window import HeldIteration
from capd.store.keeps.held_files import LEDGER_NAME, window_directory
from capd.window.settings import WindowSettings
from capd_client.protocol.counter_page import DropReason

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_NOTES_S = 1.0


class Recorder(threading.Thread):
    """The recorder of one daemon."""

    def __init__(
        self,
        settings: WindowSettings,
        root: Path,
        node: str,
        pipeline: Pipeline,
        refusal: Callable[[int], str | None],
        *,
        judges: Judges | None = None,
        is_draining: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the spool. The thread is not started.

        Args:
            settings: The settings of [window].
            root: The directory of the runs.
            node: The name of the node.
            pipeline: The pipeline, which asks `take` for each record.
            refusal: Admits bytes of the spool to the disk, or returns why it does not.
            judges: Takes records to the rules; None without rules.
            is_draining: Nothing new is held. What earlier daemons held is kept or let go.
            clock: The time (monotonic).
        """
        super().__init__(name="capd-recorder", daemon=True)
        self._settings, self._root, self._node, self._clock = settings, root, node, clock
        self._spool = HeldFiles(settings, root, node, refusal)
        self._runs: dict[str, HeldRun] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopping, self._is_draining = False, is_draining
        self._next_notes = 0.0
        self._feed = None if judges is None else HeldRecordsFeed(pipeline, judges)
        self._departures = Departures(self._spool, pipeline, self._lock, judges, self._wake.set)
        self._holding = Holding(
            settings, root, self._spool, self._runs, self._lock, self._departures, self._feed,
            wake=self._wake.set, clock=clock,
        )  # fmt: skip

    def take(self, job: RecordJob) -> bool | Refusal:
        """Hold a record, if it is one to hold. See `Holder`."""
        return self._holding.take(job)

    # For any thread

    def keep(
        self,
        run_id: str,
        iteration: int | None,
        reason: str,
        *,
        post: int | None = None,
        attempt: int | None = None,
        asker: str = "",
        is_last: bool = False,
    ) -> str:
        """Keep the iterations around one. Never waits for the disk.

        Args:
            run_id: The run.
            iteration: The iteration; None: the newest that is held, or else the one in which the ranks are.
            reason: Why.
            post: The iterations that are kept after it; None: as the settings say.
            attempt: The attempt of the run; None: the newest.
            asker: The rank that asks, for the limit of keeps; "" for all that have limits of their own.
            is_last: The rank or the daemon asks no more, and is heard beyond the limit of a run.

        Returns:
            Why nothing can be kept; "" if it is kept.
        """
        with self._lock:
            run = self._runs.get(run_id)
            if run is None:
                return f"the recorder does not know run {run_id!r}; it has {', '.join(self._runs) or 'none'}"
            if attempt is None:
                attempt = max(run.windows, default=0)
            window = run.window(attempt)
            if self._is_draining and not window.iterations:
                return "no iteration is held, and this daemon has no flight recorder"
            if iteration is None:
                iteration = window.newest if window.iterations else window.begun
            if iteration is None:
                return "no iteration is held, and no rank is in one"
            after = self._settings.post_iterations if post is None else post
            keep = make_keep(reason, attempt, iteration, self._settings.iterations, after, self._node)
            problem = run.keeps.ask(window, keep, asker, is_last=is_last)
        self._wake.set()
        return problem

    def stats(self, run_id: str) -> WindowStats | None:
        """Return what is held of a run; None if there is nothing to say of it."""
        with self._lock:
            run = self._runs.get(run_id)
            found = None if run is None else run.stats()
        if self._is_draining and found is not None and not found.iterations and not found.keeps:
            return None
        return found

    def holds(self, run_id: str) -> bool:
        """Return whether something of a run is held."""
        with self._lock:
            run = self._runs.get(run_id)
            return run is not None and next(run.held(), None) is not None

    @property
    def disk_nbytes(self) -> int:
        """The bytes of the spool on disk. Takes no lock."""
        return self._spool.disk_nbytes

    # For the registry

    def left_runs(self) -> list[str]:
        """Return the runs of which an earlier daemon left something in the spool."""
        return self._spool.left_runs()

    def open_run(self, run_id: str, committed: Callable[[bytes], Iterable[tuple[int, int]]]) -> None:
        """Take up a run, with what an earlier daemon held of it. Raises OSError.

        committed: returns the committed sequences of a client.
        """
        if run_id in self._runs:
            return
        path = self._root / f"{run_id}.zarr"
        directory = window_directory(path, self._node)
        keeps = RunKeeps(KeepsFile(path, self._node), self._node, self._clock)
        run = HeldRun(run_id, LetGoLedger(directory / LEDGER_NAME), keeps)
        for keep in keeps.earlier():
            keeps.note(run.window(keep.attempt), keep, is_new=False)
        left = LeftRecords(run, self._spool, committed, self._clock())
        left.take_up()
        with self._lock:
            self._runs[run_id] = run
        if left.count:
            logger.info("[window] run %s: %d held records of an earlier daemon", run_id, left.count)
        if self._feed is not None:
            for job in left.jobs:
                self._feed.put(job)
        self._wake.set()

    def close_run(self, run_id: str) -> None:
        """Forget a run. What is held of it stays in the spool."""
        with self._lock:
            self._runs.pop(run_id, None)

    @contextlib.contextmanager
    def joining(self, run_id: str, client: bytes) -> Iterator[HeldHistory]:
        """Give the history of a client. Nothing of it changes in the block, which sets the client's account."""
        with self._lock:
            yield self._runs[run_id].history(client)

    def final_account(self, run_id: str, client: bytes) -> dict[DropReason, int] | None:
        """Return what was let go of a client, by reason; None while the outcome of some records is open."""
        with self._lock:
            run = self._runs[run_id]
            return None if any(client in one.open for one in run.held()) else run.ledger.counts(client)

    def set_account(self, run_id: str, client: bytes, account: HeldAccount) -> None:
        """Tell `account` of the outcomes of a client's held records. Within `joining`."""
        self._runs[run_id].accounts[client] = account

    def forget(self, run_id: str, client: bytes) -> None:
        """Forget the account of a client of which nothing is open."""
        with self._lock:
            if (run := self._runs.get(run_id)) is not None:
                run.accounts.pop(client, None)
                run.committed.pop(client, None)

    def look(self, run_id: str, begun: Mapping[int, int], waiting: Iterable[int]) -> None:
        """Note the progress of a run's ranks.

        Args:
            run_id: The run.
            begun: The smallest current iteration of the ranks that are here, by attempt.
            waiting: The attempts of which a rank may come back, or has died and may still have captures in the lanes.
        """
        absent, now = set(waiting), self._clock()
        with self._lock:
            if (run := self._runs.get(run_id)) is None:
                return
            for attempt in begun:
                run.window(attempt)
            for attempt, window in run.windows.items():
                here = begun.get(attempt) if attempt not in absent else None
                window.look(here, now, is_open=attempt in begun or attempt in absent)
            run.forget_attempts(now)
        self._wake.set()

    # The end

    def stop(self, until: float) -> None:
        """Commit what is kept, let go what nobody can ask for any more, and end. The rest waits for the next daemon."""
        with self._lock:
            for run in self._runs.values():
                for window in run.windows.values():
                    if window.alone_since is not None:
                        self._release(run, [held for held in window.iterations.values() if held.may_go])
        while time.monotonic() < until and self._is_leaving():
            self._wake.set()
            time.sleep(0.02)
        self._is_stopping = True
        self._wake.set()
        self.join(max(0.1, until - time.monotonic()))
        if self._feed is not None:
            self._feed.stop(max(0.1, until - time.monotonic()))
        self._spool.close()

    def _is_leaving(self) -> bool:
        with self._lock:
            return any(run.is_leaving for run in self._runs.values())

    # The thread

    def start(self) -> None:
        """Start the thread, and the one of the rules."""
        if self._feed is not None:
            self._feed.start()
        super().start()

    def run(self) -> None:
        """The thread's loop."""
        while not self._is_stopping:
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            try:
                self.turn()
            except Exception:
                # This is the outermost loop of the thread. What is held stays in the spool.
                logger.exception("[window] failed once")
                time.sleep(_LOOK_S)

    def turn(self) -> None:
        """Write new keeps, let iterations go, and hand those that leave to the pipeline, once for each run."""
        now = self._clock()
        looks_at_notes = now >= self._next_notes
        if looks_at_notes:
            self._next_notes = now + _NOTES_S
        for run in list(self._runs.values()):
            try:
                if looks_at_notes:
                    self._hear(run)
                self._turn_of(run, now)
            except Exception:
                # One run must not stop the others. What is held stays in the spool.
                if not run.has_stumbled:
                    logger.exception("[window] run %s: failed, retrying", run.run_id)
                run.has_stumbled = True
            else:
                run.has_stumbled = False

    def _turn_of(self, run: HeldRun, now: float) -> None:
        run.keeps.write(run.run_id)
        with self._lock:
            for window in run.windows.values():
                self._release(run, window.past(now, self._settings.iterations))
            windows = list(run.windows.values())
        self._departures.let_go(run)
        for window in windows:
            self._departures.drain(run, window)

    def _release(self, run: HeldRun, iterations: list[HeldIteration]) -> None:
        """Let iterations go, or have their statistics leave. With the lock held."""
        for held in iterations:
            if self._settings.statistics:
                held.leaves = True
            else:
                run.let_go(held)

    def _hear(self, run: HeldRun) -> None:
        """Keep what the daemons of other nodes ask for."""
        told = run.keeps.told()
        with self._lock:
            for keep in told:
                run.keeps.note(run.window(keep.attempt), keep)
