"""The records that an earlier daemon left in the spool: they are held again, and damaged ones are given up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from capd.server.pipeline.jobs import RecordJob
from capd.server.recorder.departures import held_job
from capd.server.recorder.held_record import HeldIdentity
from capd.server.recorder.held_run import HeldRun
from capd.server.recorder.judging import MOST_WAITING
from capd.server.recorder.segment import DamagedFrame, FoundRecord, HeldFile
from capd.server.recorder.spool import HeldFiles
from capd.server.recorder.window import HeldIteration
from capd.store.format.ranges import RangeSet
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.messages import Define

__all__ = ["LeftRecords"]

logger = logging.getLogger(__name__)


class LeftRecords:
    """The records that are left of one run, which nobody else knows yet.

    Attributes:
        jobs: The records for the rules, as many as they take at once.
        count: All that are held again.
    """

    def __init__(
        self,
        run: HeldRun,
        spool: HeldFiles,
        committed: Callable[[bytes], Iterable[tuple[int, int]]],
        now: float,
    ) -> None:
        """Begin. committed: returns the committed sequences of a client."""
        self._run, self._spool, self._now = run, spool, now
        self._committed = committed
        self._settled: dict[bytes, RangeSet] = {}
        self._damaged: list[HeldIdentity | None] = []
        self._defines: dict[bytes, Define] = {}
        self.jobs: list[RecordJob] = []
        self.count = 0

    def take_up(self) -> None:
        """Hold what is left. Raises OSError."""
        run = self._run
        for attempt, iteration, segment in self._spool.left_segments(run.run_id):
            window = run.window(attempt)
            held = window.iterations.setdefault(iteration, HeldIteration(attempt, iteration))
            held.leaves = window.kept.find(iteration) is not None
            try:
                self._survey(held, segment)
            except OSError as error:
                logger.error("[window] %s cannot be read to its end: %s", segment.path, error)
                self._damaged.append(None)
            if segment.nbytes:
                held.segments.append(segment)
                self._spool.count(segment.nbytes, in_memory=segment.in_memory)
        self._give_up_damaged()
        for window in run.windows.values():
            for held in list(window.iterations.values()):
                if held.is_done:
                    # All of it was settled before the earlier daemon could delete it.
                    window.claim(held)
                    for segment in held.segments:
                        self._spool.remove(segment)

    def _survey(self, held: HeldIteration, segment: HeldFile) -> None:
        for found in segment.survey():
            if isinstance(found, DamagedFrame):
                self._damaged.append(found.identity)
            else:
                self._take(held, found)

    def _take(self, held: HeldIteration, found: FoundRecord) -> None:
        record = found.record
        client, sequence = record.client, record.sequence
        if sequence in self._known(client) or sequence in held.open.get(client, ()):
            return
        # Each record brings its own, and nearly all are equal.
        record.define = self._defines.setdefault(msgspec.msgpack.encode(record.define), record.define)
        held.add(client, sequence, record.define, record.descriptor.nbytes, self._now)
        self.count += 1
        if len(self.jobs) < MOST_WAITING:
            self.jobs.append(held_job(self._run.run_id, *found))
        else:
            held.leave_unjudged(client, sequence)

    def _known(self, client: bytes) -> RangeSet:
        """Return the settled records of a client."""
        if client not in self._settled:
            committed = RangeSet(self._committed(client))
            self._run.committed[client] = RangeSet(committed.ranges())
            for ranges in self._run.ledger.of(client).values():
                for first, last in ranges.ranges():
                    committed.add_range(first, last)
            self._settled[client] = committed
        return self._settled[client]

    def _give_up_damaged(self) -> None:
        """Count damaged records as store errors: they were acknowledged, and cannot be had any more."""
        if not self._damaged:
            return
        held = self._run.held()
        whole = {(client, one) for item in held for client, ranges in item.open.items() for one in ranges}
        lost: dict[bytes, RangeSet] = {}
        for found in self._damaged:
            if found is not None and found not in whole and found.sequence not in self._known(found.client):
                lost.setdefault(found.client, RangeSet()).add(found.sequence)
        named = sum(map(len, lost.values()))
        logger.error(
            "[window] run %s: %d held records are damaged in the spool; %d of them count as store_error, the others "
            "were settled before, or are missing in the count of their ranks; check the disk and the memory",
            self._run.run_id, len(self._damaged), named,
        )  # fmt: skip
        if lost:
            self._run.ledger.add(DropReason.STORE_ERROR, lost)
