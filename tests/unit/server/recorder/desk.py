"""A recorder with a clock of its own, and a pipeline whose outcomes the tests decide. No thread runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from capd.server.pipeline.jobs import Loss, RecordJob, Refusal
from capd.server.pipeline.pipeline import Pipeline
from capd.server.rank.session import Session
from capd.server.recorder.recorder import Recorder
from capd.store.format.frames import RecordRow, SeriesHeader, StatsRow
from capd.store.format.ranges import RangeSet
from capd.window.settings import WindowSettings
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Hello, Part

DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="uint8")
K = 3
NBYTES = 64
MIB = 1 << 20


def payload(sequence: int, nbytes: int = NBYTES) -> bytes:
    """The bytes of a record."""
    return (sequence.to_bytes(8, "little") * (nbytes // 8 + 1))[:nbytes]


class Lanes:
    """The pipeline after the recorder: it commits or refuses when a test says so."""

    def __init__(self) -> None:
        self.jobs: list[RecordJob] = []
        self.stored: dict[bytes, dict[int, tuple[bytes, RecordJob]]] = {}
        self.summarised = 0

    def submit(self, *jobs: RecordJob) -> None:
        self.jobs += jobs

    def statistics_of(self, job: RecordJob) -> list[Future[StatsRow]]:
        self.summarised += 1
        done: Future[StatsRow] = Future()
        done.set_result(StatsRow())
        return [done]

    def commit(self, count: int | None = None) -> None:
        """Commit the first jobs; None: all of them."""
        jobs, self.jobs = self.jobs[:count], self.jobs[len(self.jobs) if count is None else count :]
        for job in jobs:
            stored = self.stored.setdefault(job.client, {})
            assert job.sequence not in stored, "committed twice"
            stored[job.sequence] = (bytes(job.read()) if job.descriptor.payload else b"", job)
            job.sink.committed([job.sequence])

    def refuse(self, reason: DropReason) -> None:
        """Refuse the first job."""
        job = self.jobs.pop(0)
        job.sink.refused(job.sequence, reason, "the test says so")

    def committed(self, client: bytes) -> list[tuple[int, int]]:
        found = RangeSet()
        for sequence in sorted(self.stored.get(client, {})):
            found.add(sequence)
        return found.ranges()


@dataclass
class Seen:
    """The rules: what they were offered, and how much was left out."""

    records: list[RecordRow] = field(default_factory=list)
    left_out: int = 0

    def offer(self, run_id: str, records: Sequence[tuple[SeriesHeader, RecordRow]]) -> None:
        self.records += [row for _, row in records]

    def leave_out(self, count: int) -> None:
        self.left_out += count


class DeskRank:
    """A rank: its session, and the refusals that it heard of. The refusals outlive a daemon."""

    def __init__(self, client: bytes) -> None:
        self.client = client
        self.sent = 0
        self.refused: dict[int, DropReason] = {}
        self.session = Session(client, "run")

    def join(self, session: Session, connection: int) -> None:
        self.session = session
        hello = Hello(
            protocol=2, client=self.client, connection=connection, run_id="run", rank=0, pid=1, arena_nbytes=0
        )
        assert session.connect(hello) is None
        session.define(DEFINE, 100)

    # The account

    def kept(self, record: int) -> None:
        self.session.keep(record)

    def let_go(self, reason: DropReason, records: RangeSet, losses: Iterable[Loss]) -> None:
        assert len(records) == sum(count for _, _, count, _ in losses)
        self.session.lose(reason, records)


class DeskSink:
    """The sink of a rank's captures."""

    def __init__(self, rank: DeskRank) -> None:
        self._rank = rank

    def committed(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._rank.session.committed(sequence)

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        assert message
        self._rank.session.refused(sequence, reason, message)
        self._rank.refused[sequence] = reason

    def held(self, sequence: int) -> None:
        self._rank.session.hold(sequence)


class Desk:
    """A recorder over a store, its clock, its ranks, and the daemons that follow each other."""

    def __init__(self, root: Path, *, judges: Seen | None = None, **settings: Any) -> None:
        self.root, self.run = root / "store", root / "store" / "run.zarr"
        (self.run / ".capd" / "node=n").mkdir(parents=True, exist_ok=True)
        self.settings = WindowSettings(**{"iterations": K, "memory_nbytes": 0, "nbytes": MIB, **settings})
        self.now = 100.0
        self.lanes, self.judges = Lanes(), judges
        self.why_full: str | None = None
        self.ranks: dict[bytes, DeskRank] = {}
        self.connections = 0
        self.start()

    def start(self) -> None:
        """Start a daemon. An earlier one was killed: what was in its lanes is lost."""
        self.lanes.jobs.clear()
        self.recorder = Recorder(
            self.settings, self.root, "n", cast("Pipeline", self.lanes), lambda _: self.why_full,
            judges=self.judges, clock=lambda: self.now,
        )  # fmt: skip
        self.recorder.open_run("run", self.lanes.committed)
        for rank in self.ranks.values():
            self.join(rank)

    def rank(self, number: int = 0) -> DeskRank:
        """A rank that is here."""
        client = bytes([number]) * 16
        if client not in self.ranks:
            self.ranks[client] = DeskRank(client)
            self.join(self.ranks[client])
        return self.ranks[client]

    def join(self, rank: DeskRank) -> None:
        self.connections += 1
        with self.recorder.joining("run", rank.client) as history:
            committed = history.committed.ranges() if history.committed else self.lanes.committed(rank.client)
            rank.join(Session(rank.client, "run", committed, history), self.connections)
            self.recorder.set_account("run", rank.client, rank)

    def job(
        self, iteration: int, number: int = 0, *, nbytes: int = NBYTES, attempt: int = 0, **fields: Any
    ) -> RecordJob:
        """The next capture of a rank, in work."""
        rank = self.rank(number)
        rank.sent += 1
        item = Descriptor(
            rank.sent, 0, nbytes, 0, (nbytes,), Moment(iteration=iteration, attempt=attempt), **fields
        )
        [job] = self.jobs(rank, [item])
        return job

    def jobs(self, rank: DeskRank, items: Iterable[Descriptor]) -> list[RecordJob]:
        """The captures of a PUT that are new to the daemon."""
        found = rank.session.put([(item, DEFINE, None) for item in items])
        return [
            RecordJob(
                "run", rank.client, item.sequence, define, item, memoryview(payload(item.sequence, item.nbytes)),
                DeskSink(rank),
            )
            for item, define in found
        ]  # fmt: skip

    def take(self, job: RecordJob) -> bool | Refusal:
        """What the dispatch thread does with a capture."""
        outcome = self.recorder.take(job)
        if outcome is False:
            self.lanes.submit(job)
        elif outcome is not True:
            job.sink.refused(job.sequence, *outcome)
        return outcome

    def put(self, iteration: int, number: int = 0, **fields: Any) -> bool | Refusal:
        return self.take(self.job(iteration, number, **fields))

    def look(self, begun: int | None, waiting: Iterable[int] = (), attempt: int = 0) -> None:
        """The clock of the daemon: the current iteration of the slowest rank; None: there is none."""
        self.recorder.look("run", {} if begun is None else {attempt: begun}, waiting)

    def turn(self, seconds: float = 3.0) -> None:
        """Time passes, and the recorder's thread has its turn."""
        self.now += seconds
        self.recorder.turn()

    def keep(self, iteration: int | None = None, **how: Any) -> str:
        return self.recorder.keep("run", iteration, how.pop("reason", "why"), **how)

    @property
    def held(self) -> list[int]:
        """The numbers of the iterations that are held."""
        with self.recorder._lock:
            return sorted(one.iteration for one in self.recorder._runs["run"].held())

    @property
    def kept(self) -> list[int]:
        """The iterations of the committed records, whose bytes are right."""
        found = []
        for stored in self.lanes.stored.values():
            for sequence, (data, job) in stored.items():
                if job.descriptor.payload:
                    assert data == payload(sequence, len(data))
                found.append(job.descriptor.moment.iteration)
        return sorted(found)

    def files(self) -> list[Path]:
        return sorted(self.root.parent.rglob("*.held"))

    def end(self) -> None:
        """All ranks leave, and the rest goes."""
        self.look(None)
        for _ in range(3):
            self.turn()
            self.lanes.commit()

    def assert_exact(self) -> None:
        """Every capture has one outcome, or is in flight."""
        for rank in self.ranks.values():
            session = rank.session
            outcomes = [
                *session.done, *session.held, *session.in_work, *rank.refused,
                *(one for gone in session.let_go.values() for one in gone),
            ]  # fmt: skip
            assert sorted(outcomes) == list(range(1, rank.sent + 1))
            assert set(session.done) == set(self.lanes.stored.get(rank.client, ()))


def part_of(nbytes: int) -> Part:
    """The only part of a record in parts."""
    return Part(1, 0, nbytes)


def overwrite(path: Path, at: int, data: bytes) -> None:
    """Damage a file."""
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, at)
    os.close(fd)
