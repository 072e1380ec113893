"""The registry: the runs that this daemon writes, their ranks, who may join, and when a run is sealed.

The daemon's clock calls `tick` a few times a second (`capd.server.runs.upkeep`). A run is sealed when its last rank
has been gone for `idle_seal_s`. Ranks that come later reopen it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

from capd.errors import ArenaError, ConfigError, StoreError
from capd.lifecycle.trash import settle
from capd.metrics import RunStats
from capd.server.net.peer import Refusal
from capd.server.pipeline.pipeline import Pipeline
from capd.server.process import has_ended
from capd.server.rank.accounting import settled
from capd.server.rank.arena import Arena
from capd.server.rank.rank import RankSession
from capd.server.rank.session import Session
from capd.server.recorder.held_run import HeldHistory
from capd.server.recorder.recorder import Recorder
from capd.server.runs.attempts import read_beside, shift_of
from capd.server.runs.figures import RunFigures, run_figures
from capd.server.runs.names import RunNames
from capd.server.runs.root_lock import RootLock
from capd.server.runs.run import Run
from capd.server.runs.snapshot import run_stats
from capd.server.runs.upkeep import Upkeep, log_end
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, SessionRow
from capd.store.catalog.sessions import read_sessions
from capd.store.format.ranges import RangeSet
from capd.store.run.usage import Use
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import PROTOCOL_VERSION, Hello

__all__ = ["Registry"]

logger = logging.getLogger(__name__)

# The runs of one daemon. A rank that brings one more is refused.
MAX_RUNS = 1024
# Sealed runs without ranks that STATS still shows.
MAX_QUIET_RUNS = 64
# The age at which the part of a run that other nodes wrote is read again.
_BESIDE_S = 2.0
# A job may bring ranks that late, after its other ranks have gone.
_LATE_S = 10.0
# Errors of resources that may be available again later.
_SCARCE = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})


class Registry:
    """All runs and ranks of the daemon."""

    def __init__(
        self, root: Path, node: str, lock: RootLock, names: RunNames, pipeline: Pipeline, idle_seal_s: float
    ) -> None:
        self._root, self._node, self._owner, self._names = root, node, lock, names
        self._pipeline = pipeline
        self._idle_seal_s = idle_seal_s
        # The daemon sets it before ranks come. None: nothing is held.
        self.recorder: Recorder | None = None
        self._lock = threading.Lock()
        self._upkeep = Upkeep(pipeline, self._lock, idle_seal_s)
        self._runs: dict[str, Run] = {}
        self._closing = False
        # Connections of ranks that were admitted.
        self.admitted = 0
        # The bytes that this daemon added to runs that it forgot. They count against the disk budget.
        self._forgotten_nbytes = 0
        # The same by the path of the run.
        self._forgotten: dict[Path, int] = {}
        # Older shards are of earlier daemons.
        self._started_s = time.time()
        # Forgotten runs whose stores are being closed.
        self._closings: dict[str, Future[None]] = {}

    # From connections

    def admit(self, hello: Hello, fd: int, process: int | None) -> RankSession:
        """Admit a rank: open its run, check its arena, and end older connections of it.

        The caller closes `fd`, the descriptor of the arena. On return the session owns `process`, a pidfd. None: the
        process is unknown.

        Raises:
            Refusal: The rank may not join, or not now.
        """
        # A rank that is gone cannot come back to the next daemon. Its arena is accepted as long as a pipeline runs.
        gone = process is not None and has_ended(process)
        if hello.protocol != PROTOCOL_VERSION:
            raise Refusal(
                "version",
                f"the rank speaks protocol {hello.protocol}, this daemon {PROTOCOL_VERSION}; "
                f"install the same capd version on both sides",
            )
        with self._lock:
            if self._closing and not gone:
                raise Refusal("closing", "the daemon is shutting down", retry=True)
            run = self._run_of(hello)
            run.arriving += 1
        try:
            with self._arriving(run):
                self._open(run)
                self._look_beside(run)
                return self._place(run, hello, fd, process)
        except ArenaError as error:
            scarce = isinstance(error.__cause__, OSError) and error.__cause__.errno in _SCARCE
            raise Refusal("arena", str(error), retry=scarce) from error
        except StoreError as error:
            # A locked store or a refusal of the operating system may pass. A foreign or newer store will not.
            retry = error.retry or isinstance(error.__cause__, OSError)
            raise Refusal("run", str(error), retry=retry) from error

    @contextlib.contextmanager
    def _arriving(self, run: Run) -> Iterator[None]:
        """Count `run.arriving` down at the end, and forget the run if it could not be opened."""
        try:
            yield
        finally:
            with self._lock:
                run.arriving -= 1
                run.quiet_since = time.monotonic()
                if not run.opened and not run.arriving:
                    self._runs.pop(run.run_id, None)

    def _run_of(self, hello: Hello) -> Run:
        try:
            run_id = self._names.resolve(hello.run_id, self._is_active)
        except ConfigError as error:
            raise Refusal("run", str(error)) from error
        for run in self._runs.values():
            if hello.client in run.ranks and run.run_id != run_id:
                raise Refusal("run", f"this client writes to run {run.run_id!r} already, not {run_id!r}")
        note = self._owner.note
        if note.assigned_run != self._names.assigned:
            note.assigned_run = self._names.assigned
            self._owner.write()
        return self._run(run_id)

    def _run(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            if len(self._runs) >= MAX_RUNS:
                raise Refusal("run", f"this daemon writes {MAX_RUNS} runs already; start another one")
            run = self._runs[run_id] = Run(run_id, self._root / f"{run_id}.zarr")
        return run

    def _is_active(self, run_id: str) -> bool:
        run = self._runs.get(run_id)
        if run is None:
            return False
        quiet_s = time.monotonic() - run.quiet_since
        return bool(run.ranks or run.arriving or quiet_s < self._idle_seal_s)

    def _open(self, run: Run) -> None:
        """Open or recover the run. It may take long, so it is called without the lock."""
        if not self._root.is_dir():
            raise StoreError(f"the store {self._root} is gone; restart `capd serve`")
        # Otherwise the run could be closed just after it was found open.
        if (closing := self._closings.get(run.run_id)) is not None:
            wait([closing])
        # One rank opens the run, before any is placed. Otherwise a slow one would take the row of a rank that died in
        # the meantime for one that an earlier daemon left, and count what is in work as lost.
        with run.opening:
            if run.opened:
                return
            try:
                # A kill interrupted the removal of the run of this name.
                settle(run.path)
            except OSError as error:
                raise StoreError(f"cannot complete the removal of {run.path}: {error}") from error
            self._pipeline.open_run(run.run_id)
            if self.recorder is not None:
                self._open_window(self.recorder, run.run_id)
            totals = self._pipeline.run_stats(run.run_id)
            overhead = self._pipeline.overhead_nbytes(run.run_id)
            rows = [self._settled(run, row) for row in self._earlier_rows(run)]
            with self._lock:
                run.opened, run.totals, run.overhead_bytes = True, totals, overhead
                run.stored_before = totals.stored_bytes + overhead
                run.finished = {row.client: row for row in rows}

    def _open_window(self, recorder: Recorder, run_id: str) -> None:
        try:
            recorder.open_run(run_id, lambda client: self._pipeline.committed(run_id, client))
        except OSError as error:
            raise StoreError(f"the held records of run {run_id!r} cannot be read: {error}") from error

    def _look_beside(self, run: Run) -> None:
        """Read what other nodes wrote to the run, unless that was just done. It may take long."""
        now = time.monotonic()
        if now - run.beside_at > _BESIDE_S:
            run.beside, run.beside_at = read_beside(run.path, self._node), now

    def _earlier_rows(self, run: Run) -> list[SessionRow]:
        catalog = run.path / ".capd" / f"node={self._node}" / CATALOG_NAME
        db = connect_read_only(catalog)
        try:
            rows = read_sessions(db)
            if not rows and run.stored_attempt < 0:
                (highest,) = db.execute("SELECT MAX(attempt) FROM records").fetchone()
                run.stored_attempt = -1 if highest is None else highest
            return rows
        except sqlite3.DatabaseError as error:
            raise StoreError(
                f"cannot read the sessions in {catalog}: {error}",
                retry=isinstance(error, sqlite3.OperationalError),
            ) from error
        finally:
            db.close()

    def _settled(self, run: Run, row: SessionRow) -> SessionRow:
        """Return an earlier session's row with final counters, also if a killed daemon had captures of it in work."""
        if row.clean or row.state == "live":
            return row
        committed = len(RangeSet(self._pipeline.committed(run.run_id, row.client)))
        if self.recorder is None:
            final = settled(
                row, committed, {DropReason(reason): count for reason, count in row.let_go.items()}
            )
        else:
            with self.recorder.joining(run.run_id, row.client) as history:
                if history.held:
                    # The outcome of these is open.
                    return row
                final = settled(row, committed, {reason: len(one) for reason, one in history.let_go.items()})
        self._pipeline.save_session(run.run_id, final)
        return final

    def _place(self, run: Run, hello: Hello, fd: int, process: int | None) -> RankSession:
        client = hello.client
        with self._lock:
            rank = run.ranks.get(client)
            before = run.finished.get(client)
            arena = rank.arena_of(fd, hello.arena_nbytes) if rank else Arena(fd, hello.arena_nbytes)
            if rank is None:
                started_ns = before.started_ns if before else time.time_ns()
                # A client without a rank has nothing in work.
                submit, forget = self._pipeline.submit, self._pipeline.forget
                shift = self._shift(run, hello) if before is None else before.shift
                continued = run.held_before.get(hello.attempt + shift, 0) if shift else 0
                with self._history(run.run_id, client) as history:
                    if history is None or history.committed is None:
                        committed = self._pipeline.committed(run.run_id, client)
                    else:
                        # Records of it may be on their way from the spool to the store.
                        committed = history.committed.ranges()
                    session = Session(client, run.run_id, committed, history)
                    rank = RankSession(
                        session, hello, arena, submit, forget, started_ns, run.steering, shift, continued
                    )
                    if self.recorder is not None:
                        self.recorder.set_account(run.run_id, client, rank)
            reject = rank.connect(hello, arena, process)
            if reject is not None:
                raise Refusal(reject.code, reject.message)
            run.ranks[client] = rank
            self.admitted += 1
            run.finished.pop(client, None)
            # Before any of its captures, so that a daemon killed now leaves no records of an unknown session.
            self._pipeline.save_session(run.run_id, rank.row())
        return rank

    def _history(self, run_id: str, client: bytes) -> contextlib.AbstractContextManager[HeldHistory | None]:
        return contextlib.nullcontext() if self.recorder is None else self.recorder.joining(run_id, client)

    def _shift(self, run: Run, hello: Hello) -> int:
        """Return what is added to the attempt of a new rank. The first rank of an attempt is logged."""
        shift = shift_of(
            hello, run.members(), idle_s=max(self._idle_seal_s, _LATE_S), stored=run.stored_attempt
        )
        attempt = hello.attempt + shift
        if attempt not in run.held_before:
            held = self._pipeline.run_stats(run.run_id).records + run.beside.records
            run.held_before[attempt] = held
            if held and attempt:
                logger.info("attempt %d continues run %s, which holds %d records", attempt, run.run_id, held)
        return shift

    # From tools and from the daemon

    def adopt(self, run_id: str) -> None:
        """Open a run that an earlier daemon left unsealed. It is sealed unless ranks come. Raises StoreError."""
        try:
            with self._lock:
                run = self._run(run_id)
                run.arriving += 1
        except Refusal as refusal:
            raise StoreError(str(refusal)) from refusal
        with self._arriving(run):
            self._open(run)

    def runs(self) -> list[Run]:
        """Return all runs, the newest last."""
        with self._lock:
            return list(self._runs.values())

    def stats(self, run_id: str | None) -> list[RunStats]:
        """Return the current counters of one run, or of all."""
        found = []
        for run in self.runs():
            if run_id not in (None, run.run_id):
                continue
            # Under the lock, a rank that is just finishing counts once. A run that was just forgotten is closed.
            uses: list[Use] = []
            with self._lock:
                if run.opened and self._runs.get(run.run_id) is run:
                    run.totals = self._pipeline.run_stats(run.run_id)
                    uses = self._pipeline.uses(run.run_id)
                ranks, finished = list(run.ranks.values()), list(run.finished.values())
            window = None if self.recorder is None else self.recorder.stats(run.run_id)
            found.append(run_stats(run, ranks, finished, uses, window))
        return found

    def figures(self, *, each_rank: bool) -> list[RunFigures]:
        """Return the figures of all runs for metrics, the newest last. each_rank: also those of each rank."""
        found = []
        for run in self.runs():
            # As in `stats`.
            with self._lock:
                if not run.opened or self._runs.get(run.run_id) is not run:
                    continue
                run.totals, values = (
                    self._pipeline.run_stats(run.run_id),
                    self._pipeline.non_finite(run.run_id),
                )
                uses = self._pipeline.uses(run.run_id)
                ranks, finished = list(run.ranks.values()), list(run.finished.values())
            figures = run_figures(run, ranks, finished, each_rank=each_rank)
            figures.quota_ratio = max((use.used / max(1, use.max) for use in uses), default=None)
            figures.nan, figures.inf = values.nan, values.inf
            figures.window = None if self.recorder is None else self.recorder.stats(run.run_id)
            found.append(figures)
        return found

    def stored_nbytes(self) -> int:
        """Return the bytes that this daemon added and still holds: shards, small-record logs and catalogs."""
        with self._lock:
            for run in self._runs.values():
                if run.opened:
                    self._measure(run)
            return self._forgotten_nbytes + sum(run.added_nbytes for run in self._runs.values())

    def moved(self, path: Path, shard: os.stat_result) -> None:
        """Count a shard of a run that was moved to an object store: it takes no space any more.

        Args:
            path: The directory of the run.
            shard: The file as it was. One that an earlier daemon completed was never counted.
        """
        if shard.st_mtime < self._started_s:
            return
        with self._lock:
            run = next((one for one in self._runs.values() if one.path == path), None)
            if run is not None:
                run.moved_nbytes += shard.st_size
            else:
                nbytes = min(shard.st_size, self._forgotten.get(path, 0))
                self._forgotten_nbytes -= nbytes
                self._forgotten[path] = self._forgotten.get(path, 0) - nbytes

    def _measure(self, run: Run) -> None:
        run.totals = self._pipeline.run_stats(run.run_id)
        run.overhead_bytes = self._pipeline.overhead_nbytes(run.run_id)

    def seal(self, run_id: str) -> Future[None]:
        """Seal a run now. Raises StoreError if this daemon has not opened the run."""
        with self._lock:
            run = self._runs.get(run_id)
            if run is None or not run.opened:
                raise StoreError(f"run {run_id!r} is not open yet; try again", retry=True)
            return self._upkeep.begin_seal(run, is_last=not run.alive() and not run.arriving)

    def release(self, run_id: str, timeout_s: float) -> str:
        """Close a sealed run without ranks, so that it can be removed. A rank that comes later opens it again.

        Returns:
            Why the run stays open; "" if it is closed now.
        """
        with self._lock:
            run = self._runs.get(run_id)
            if run is not None:
                if run.ranks or run.arriving:
                    return f"run {run_id!r} has ranks"
                if not run.sealed:
                    return f"run {run_id!r} is not sealed yet; `capd ctl seal` seals it"
                if run.holds:
                    return f"the flight recorder holds records of run {run_id!r}; try again in some seconds"
                self._forget(run)
            closing = self._closings.get(run_id)
        if closing is not None and not wait([closing], timeout_s).done:
            return f"run {run_id!r} could not be closed within {timeout_s:g} s"
        return ""

    def is_quiet(self) -> bool:
        """Return whether no rank is here or may come back, and everything is sealed."""
        return all(run.quiet for run in self.runs())

    def has_ranks(self) -> bool:
        """Return whether a rank is here, or may come back."""
        return any(run.arriving or run.alive() for run in self.runs())

    def refuse_new(self) -> None:
        """Admit no rank from now on."""
        with self._lock:
            self._closing = True

    # The clock

    def tick(self) -> None:
        """Note deaths, persist changed counters, and seal runs that have been quiet."""
        now = time.monotonic()
        for run in self.runs():
            if run.opened:
                run.count(self._pipeline.run_stats(run.run_id), now)
                self._upkeep.ranks(run, now, self.recorder)
                if self.recorder is not None:
                    self._upkeep.window(self.recorder, run, now)
                run.steer()
                self._upkeep.seal(run, now)
        self._forget_old_runs()
        self._discount_a_removed_run()

    def look_at_windows(self) -> None:
        """Tell the recorder how far the ranks are, and of deaths that the clock has not seen."""
        for run in self.runs():
            if run.opened and self.recorder is not None:
                self._upkeep.window(self.recorder, run, time.monotonic())

    def recover_all(self, timeout_s: float) -> None:
        """Recover the captures in the arenas of ranks that are gone, before the pipeline ends."""
        until = time.monotonic() + timeout_s
        ranks = [rank for run in self.runs() for rank in list(run.ranks.values())]
        for rank in ranks:
            rank.check_process(grace_s=None)
        for rank in ranks:
            if not rank.wait_recovered(max(0.0, until - time.monotonic())):
                logger.warning("the arena of rank %d could not be recovered in time", rank.hello.rank)

    def save_all(self, timeout_s: float) -> None:
        """Persist the current counters of every rank. The first failure is logged and ends the call."""
        until = time.monotonic() + timeout_s
        for run in self.runs():
            for rank in list(run.ranks.values()):
                rank.check_process(grace_s=None)
                with self._lock:
                    row = rank.row()
                    saving = self._pipeline.save_session(rank.run_id, row)
                try:
                    saving.result(max(0.0, until - time.monotonic()))
                except (TimeoutError, OSError, StoreError) as error:
                    logger.error("counters of rank %d could not be saved: %s", rank.hello.rank, error)
                    return
                # The clock has not seen the end of this rank.
                if rank.at_rest:
                    log_end(rank, row)

    def _discount_a_removed_run(self) -> None:
        """Look for one forgotten run after the other. The bytes of a removed one no longer count."""
        with self._lock:
            path = next(iter(self._forgotten), None)
        if path is None:
            return
        is_there = path.exists()
        with self._lock:
            nbytes = self._forgotten.pop(path, 0)
            if is_there:
                # To the end of the line.
                self._forgotten[path] = nbytes
            else:
                self._forgotten_nbytes -= nbytes

    def _forget(self, run: Run) -> None:
        """Begin to close a sealed run without ranks. The caller holds the lock."""
        # Its seal may have ended after the last tick.
        self._measure(run)
        del self._runs[run.run_id]
        self._forgotten_nbytes += run.added_nbytes
        self._forgotten[run.path] = self._forgotten.get(run.path, 0) + run.added_nbytes
        if self.recorder is not None:
            self.recorder.close_run(run.run_id)
        self._closings[run.run_id] = self._pipeline.close_run(run.run_id)

    def _forget_old_runs(self) -> None:
        with self._lock:
            quiet = [run for run in self._runs.values() if run.quiet]
            # An old run that ranks have continued is as new as its last rank.
            quiet.sort(key=lambda run: run.quiet_since)
            for run in quiet[: max(0, len(quiet) - MAX_QUIET_RUNS)]:
                self._forget(run)
            for run_id, closing in list(self._closings.items()):
                if closing.done():
                    del self._closings[run_id]
                    if (error := closing.exception()) is not None:
                        logger.error("run %s could not be closed: %s", run_id, error)
