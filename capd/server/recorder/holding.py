"""The way into the spool: the dispatch thread copies a record, acknowledges it, and makes room for it if need be."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from capd.server.pipeline.jobs import RecordJob, Refusal
from capd.server.pipeline.refusals import refusal_of
from capd.server.recorder.departures import Departures, KeptSink, held_job, marked
from capd.server.recorder.held_record import HeldRecord, encode_record
from capd.server.recorder.held_run import HeldRun
from capd.server.recorder.judging import HeldRecordsFeed
from capd.server.recorder.segment import frame_nbytes
from capd.server.recorder.spool import DiskRefused, HeldFiles
from capd.server.recorder.window import HeldIteration, oldest
from capd.space import shown_size
from capd.window.settings import WindowSettings
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.scalars import is_scalar

__all__ = ["Holding"]

logger = logging.getLogger(__name__)

_PIECE_NBYTES = 1 << 20


class Holding:
    """Holds the records of all runs. One thread calls it."""

    def __init__(
        self,
        settings: WindowSettings,
        root: Path,
        spool: HeldFiles,
        runs: Mapping[str, HeldRun],
        lock: threading.Lock,
        departures: Departures,
        feed: HeldRecordsFeed | None,
        *,
        wake: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        """Prepare to hold. lock: the recorder's. wake: is called when something of a run leaves."""
        self._settings, self._root, self._spool, self._runs, self._lock = settings, root, spool, runs, lock
        self._departures, self._feed, self._wake, self._clock = departures, feed, wake, clock

    def take(self, job: RecordJob) -> bool | Refusal:
        """Hold a record, if it is one to hold. See `Holder`."""
        is_for_it = (
            job.descriptor.payload and not is_scalar(job.define.key) and not isinstance(job.sink, KeptSink)
        )
        run = self._runs.get(job.run_id) if is_for_it else None
        return False if run is None else self._take(run, job)

    def _take(self, run: HeldRun, job: RecordJob) -> bool | Refusal:
        moment = job.descriptor.moment
        with self._lock:
            window = run.window(moment.attempt)
            kept = window.kept.find(moment.iteration)
            # Later records of a client stay in line with those that still leave.
            if kept is None or window.has_backlog:
                held = window.iterations.setdefault(
                    moment.iteration, HeldIteration(moment.attempt, moment.iteration)
                )
                # So it stays.
                held.writing += 1
            else:
                job.descriptor.metadata = marked(job.descriptor.metadata, kept)
                return False
        outcome: Refusal | bool | None = None
        try:
            outcome = self._hold(run, held, job)
        except DiskRefused as refused:
            outcome = DropReason.DISK_FULL, str(refused)
        except Exception as error:
            # An error of one record must not end the dispatch thread.
            outcome = refusal_of(error, self._root)
        finally:
            with self._lock:
                held.writing -= 1
                # It may have become kept in the meantime.
                kept = window.kept.find(moment.iteration)
                held.leaves |= kept is not None
                if held.is_done and not held.segments:
                    window.claim(held)
        if held.leaves:
            self._wake()
        if outcome is True:
            return True
        if kept is not None:
            # The store may have the room that the spool lacks.
            job.descriptor.metadata = marked(job.descriptor.metadata, kept)
            return False
        return self._without_room(run, job) if outcome is None else outcome

    def _hold(self, run: HeldRun, held: HeldIteration, job: RecordJob) -> Refusal | bool | None:
        """Copy a record and report it as held. Return True, the reason against it, or None: the spool has no room."""
        # The bytes as they are held: in C order, at no place of an arena.
        descriptor = replace(job.descriptor, offset=0, row_offset=None, part=None, order=None)
        record = HeldRecord(job.client, job.sequence, job.define, descriptor, job.row)
        description = encode_record(record)
        in_memory = self._room(run, frame_nbytes(description, descriptor.nbytes))
        if not isinstance(in_memory, bool):
            return in_memory
        data = self._spool.append(
            run.run_id, held, record, description, lambda: _pieces(job), in_memory=in_memory
        )
        with self._lock:
            held.add(job.client, job.sequence, job.define, descriptor.nbytes, self._clock())
            job.sink.held(job.sequence)
            if self._feed is not None and not self._feed.put(held_job(run.run_id, record, data)):
                held.leave_unjudged(job.client, job.sequence)
        return True

    def _room(self, run: HeldRun, size: int) -> bool | Refusal | None:
        """Let the oldest iterations go until a record fits.

        Returns:
            Whether it fits into memory; None: nothing more can go; else why nothing can be let go.
        """
        while True:
            with self._lock:
                if (in_memory := self._spool.reserve(size)) is not None:
                    return in_memory
                # Another run may hold more.
                owner = next(
                    (one for one in (run, *self._runs.values()) if one.going or oldest(one.windows)), None
                )
                if owner is None:
                    return None
                if not owner.going and (gone := oldest(owner.windows)) is not None:
                    if self._settings.statistics:
                        # One at a time: each further record would have another one leave until the first is stored.
                        if not any(one.leaves for one in owner.held()):
                            gone.leaves = True
                        self._wake()
                        return None
                    owner.let_go(gone)
            if (error := self._departures.let_go(owner)) is not None:
                return refusal_of(error, self._root)

    def _without_room(self, run: HeldRun, job: RecordJob) -> bool | Refusal:
        """Decide about a record for which the spool has no room."""
        if self._settings.statistics and job.keep_statistics():
            return False
        iteration, limit = job.descriptor.moment.iteration, shown_size(self._settings.nbytes)
        run.expired += 1
        with self._lock:
            is_storing = any(one.leaves for other in self._runs.values() for one in other.held())
        if is_storing:
            return (
                DropReason.EXPIRED,
                f"the {limit} of [window] bytes are full of records that are being stored",
            )
        if not run.has_overflowed:
            run.has_overflowed = True
            logger.warning(
                "[window] run %s: iteration %d alone needs more than the %s of [window] bytes; what does not fit is "
                "let go at once and counted as expired. Raise bytes, or capture less",
                run.run_id, iteration, limit,
            )  # fmt: skip
        return DropReason.EXPIRED, f"iteration {iteration} needs more than the {limit} of [window] bytes"


def _pieces(job: RecordJob) -> Iterator[bytes]:
    """Yield copies of the bytes of a record, because the rank can still change its arena. Raises OSError."""
    data = job.data
    if isinstance(data, memoryview):
        view = memoryview(job.read())
        for at in range(0, len(view), _PIECE_NBYTES):
            yield bytes(view[at : at + _PIECE_NBYTES])
        return
    for at in range(0, data.nbytes, _PIECE_NBYTES):
        yield bytes(data.read(at, min(_PIECE_NBYTES, data.nbytes - at)))
