"""The ways out of the spool: held records are let go, or handed to the ordinary pipeline in order.

A record that is let go is first in the ledger, then in its rank's account, and its bytes go last. If the ledger cannot
be written, it stays held. No file is touched while the lock is held.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from capd.server.pipeline.jobs import RecordJob
from capd.server.pipeline.pipeline import Pipeline
from capd.server.recorder.held_record import HeldIdentity, HeldRecord
from capd.server.recorder.held_run import HeldRun, UnkeptRecord
from capd.server.recorder.judging import Judges
from capd.server.recorder.kept_ranges import KeptRange
from capd.server.recorder.segment import FoundRecord, HeldBytes, HeldFile
from capd.server.recorder.spool import HeldFiles
from capd.server.recorder.window import AttemptWindow, HeldIteration
from capd.store.format.ranges import RangeSet
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import MAX_METADATA_NBYTES, Define

__all__ = ["Departures", "KeptSink", "held_job", "marked"]

logger = logging.getLogger(__name__)

# The bytes of kept records on their way through the pipeline.
_IN_FLIGHT_NBYTES = 64 << 20
# The memory that one of them takes beside its elements.
_JOB_NBYTES = 2 << 10
# Records up to this size are read once, as a whole.
_WHOLE_NBYTES = 8 << 20


class KeptSink:
    """The sink of a record from the spool."""

    def __init__(self, settled: Callable[[DropReason | None], None] = lambda _: None) -> None:
        """settled: takes the reason why it is not committed; None: it is."""
        self._settled = settled

    def committed(self, _: Sequence[int]) -> None:
        """Note that the record is committed."""
        self._settled(None)

    def refused(self, _: int, reason: DropReason, message: str) -> None:
        """Note that the record is not committed."""
        logger.warning("[window] a held record is not kept: %s", message)
        self._settled(reason)

    def held(self, _: int) -> None:
        """Raise AssertionError: a record from the spool is not held again."""
        raise AssertionError("a record from the spool is not held again")


class Departures:
    """The departures of all runs. lock: the recorder's."""

    def __init__(
        self,
        spool: HeldFiles,
        pipeline: Pipeline,
        lock: threading.Lock,
        judges: Judges | None,
        wake: Callable[[], object],
    ) -> None:
        """Begin with none. wake: is called when the outcome of a record is known."""
        self._spool, self._pipeline, self._lock, self._judges, self._wake = (
            spool,
            pipeline,
            lock,
            judges,
            wake,
        )
        # One thread at a time lets records go.
        self._going = threading.Lock()
        self._in_flight_nbytes = 0

    def let_go(self, run: HeldRun) -> OSError | None:
        """Let the iterations in `run.going` go, and settle refused records. Return why not all of them could."""
        with self._going:
            try:
                while run.going:
                    self._let_go(run, run.going[0])
                while run.unkept:
                    self._give_up(run, run.unkept[0])
            except OSError as error:
                if not run.has_failed:
                    logger.error(
                        "[window] run %s: nothing is let go while its ledger cannot be written, retrying: %s",
                        run.run_id, error,
                    )  # fmt: skip
                run.has_failed = True
                return error
            run.has_failed = False
        return None

    def _let_go(self, run: HeldRun, held: HeldIteration) -> None:
        reason = DropReason.STORE_ERROR if held.is_damaged else DropReason.EXPIRED
        run.ledger.add(reason, held.open)
        with self._lock:
            run.note_gone(reason, held.open, {client: held.losses_of(client) for client in held.open})
            held.open = {}
        if self._judges is not None and (unseen := sum(map(len, held.unjudged.values()))):
            self._judges.leave_out(unseen)
        self._delete(held)
        with self._lock:
            # Now its bytes are free. Who looks for room before waits for it instead of letting another one go.
            run.going.remove(held)

    def _give_up(self, run: HeldRun, unkept: UnkeptRecord) -> None:
        held, client, sequence, reason, loss = unkept
        gone = {client: RangeSet([(sequence, sequence)])}
        run.ledger.add(reason, gone)
        with self._lock:
            run.unkept.popleft()
            held.settle(client, sequence)
            run.note_gone(reason, gone, {client: [loss]})

    def drain(self, run: HeldRun, window: AttemptWindow) -> None:
        """Hand records that leave to the pipeline, in order, as far as it takes them."""
        with self._lock:
            leaving = [held for _, held in sorted(window.iterations.items()) if held.leaves]
        for held in leaving:
            for segment in list(held.segments):
                if not self._drain(run, window, held, segment):
                    return
            with self._lock:
                lost = sum(map(len, held.open.values())) if run.is_exhausted(held) else 0
                if lost:
                    held.is_damaged = True
                    run.let_go(held)
                elif held.is_done:
                    window.claim(held)
                else:
                    continue
            if lost:
                logger.error(
                    "[window] run %s: %d held records of iteration %d are damaged or deleted in the spool and count as "
                    "store_error; check the disk, the memory, and who deletes files there",
                    run.run_id, lost, held.iteration,
                )  # fmt: skip
            else:
                self._delete(held)

    def _drain(self, run: HeldRun, window: AttemptWindow, held: HeldIteration, segment: HeldFile) -> bool:
        """Hand the records of a segment to the pipeline. Return whether it took all of them. Raises OSError."""
        end = segment.nbytes
        for found in self._waiting(segment, end):
            if self._in_flight_nbytes >= _IN_FLIGHT_NBYTES:
                return False
            if not self._submit(run, held, window.kept.find(held.iteration), found):
                return False
            segment.taken = found.data.end
        # The end may be damaged.
        segment.taken = end
        return True

    def _waiting(self, segment: HeldFile, end: int) -> Iterator[FoundRecord]:
        """Yield the records of a segment that can be read; none if it was deleted."""
        with contextlib.suppress(FileNotFoundError):
            yield from segment.waiting(end)

    def _submit(self, run: HeldRun, held: HeldIteration, kept: KeptRange | None, found: FoundRecord) -> bool:
        """Hand a record to the pipeline. Return False if its holder is not done with it yet."""
        record, data = found
        with self._lock:
            if record.sequence not in held.open.get(record.client, ()):
                # Its outcome is known, or it is in the file and not yet in the account.
                return not held.writing
            is_judged = record.sequence not in held.unjudged.get(record.client, ())
            held.pending += 1
            self._in_flight_nbytes += _JOB_NBYTES + data.nbytes
        job = held_job(run.run_id, record, data)
        job.judged = is_judged and self._judges is not None
        # Without the job, which would then live until the next search for garbage, and its bytes with it.
        settled = partial(
            self._settled, run, held, HeldIdentity(job.client, job.sequence), (job.define, data.nbytes)
        )
        job.sink = KeptSink(settled)
        try:
            job.data = data.checked(_WHOLE_NBYTES)
        except OSError as error:
            job.sink.refused(job.sequence, DropReason.STORE_ERROR, str(error))
            return True
        if kept is not None:
            job.descriptor.metadata = marked(job.descriptor.metadata, kept)
        elif not job.keep_statistics():
            settled(DropReason.EXPIRED)
            return True
        self._pipeline.submit(job)
        return True

    def _settled(
        self,
        run: HeldRun,
        held: HeldIteration,
        identity: HeldIdentity,
        what: tuple[Define, int],
        reason: DropReason | None,
    ) -> None:
        """Note the outcome of a record that left. Any thread of the pipeline calls it."""
        define, nbytes = what
        with self._lock:
            held.pending -= 1
            self._in_flight_nbytes -= _JOB_NBYTES + nbytes
            if reason is None:
                run.note_kept(held, *identity)
            else:
                # Its way through the ledger is not for a thread of the pipeline.
                run.unkept.append(UnkeptRecord(held, *identity, reason, (define, held.iteration, 1, nbytes)))
        self._wake()

    def _delete(self, held: HeldIteration) -> None:
        for segment in held.segments:
            self._spool.remove(segment)


def held_job(run_id: str, record: HeldRecord, data: HeldBytes) -> RecordJob:
    """Return the job of a record in the spool."""
    return RecordJob(
        run_id, record.client, record.sequence, record.define, record.descriptor, data, KeptSink(), record.row
    )


def marked(metadata: bytes, kept: KeptRange) -> bytes:
    """Return the metadata of a record with the reason for which it is kept, if there is room and no other `trigger`."""
    with contextlib.suppress(ValueError, TypeError):
        found = json.loads(metadata) if metadata else {}
        if "trigger" in found:
            # The job's own comes first.
            return metadata
        found["trigger"] = {"reason": kept.reason, "iteration": kept.iteration}
        new = json.dumps(found, ensure_ascii=False).encode()
        return new if len(new) <= MAX_METADATA_NBYTES else metadata
    return metadata
