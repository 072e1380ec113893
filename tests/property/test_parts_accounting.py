"""Records in parts: a rank's queue against the daemon's session, with lost connections, restarts, refusals and deaths.

Everything between the two is simulated in one thread, so that every interleaving can be tried: the socket, the thread
that gathers, the store. The arena is real memory: a slot that is given away too early shows as a wrong byte.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from capd.server.rank.accounting import PageCounters, SessionTotals, reconcile
from capd.server.rank.session import Session
from capd_client.arena.allocator import SlotAllocator
from capd_client.inflight.capture import COPYING, Capture
from capd_client.inflight.counters import Counters
from capd_client.inflight.definitions import Definition
from capd_client.inflight.parts import PartCapture, Record
from capd_client.inflight.policies import Block
from capd_client.inflight.queue import Queue
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Ack, Define, Descriptor, Hello, Nack

PAGE = 4096
PAGES = 8
CLIENT = b"c" * 16
NO_WAIT_S = 1e-9


def content(record: int, first: int, nbytes: int) -> bytes:
    """A record's bytes, different for every record and page."""
    return b"".join(
        bytes([(37 * record + (first + at) // PAGE) % 251]) * min(PAGE, nbytes - at)
        for at in range(0, nbytes, PAGE)
    )


@dataclass
class Daemon:
    """One process: a session, the work that its pipeline holds, and the bytes of the parts that gather."""

    session: Session
    work: deque[tuple[Descriptor, Define]] = field(default_factory=deque)
    files: dict[int, bytes] = field(default_factory=dict)


class Parts(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = bytearray((PAGES + 1) * PAGE)
        self.queue = Queue(SlotAllocator(PAGE, PAGES * PAGE), Counters(), Block(NO_WAIT_S))
        key = Key(quant_type="bf16", rank=0, tensor_name="x")
        self.definition: Definition = self.queue.definitions.make(key, torch.uint8, None)
        self.store: dict[int, bytes] = {}  # survives the daemon
        self.open: list[Record] = []  # a thread is inside capture()
        self.copying: list[Capture] = []
        self.socket: deque[Descriptor] = deque()  # sent, not read
        self.connection = 0
        self.daemon = self.new_daemon()

    # -- the rank

    @rule(pages=st.integers(1, 2))
    def offer(self, pages: int) -> None:
        capture = self.queue.admit(self.definition, self.descriptor(pages * PAGE))
        if isinstance(capture, Capture):
            self.fill(capture)

    @precondition(lambda self: len(self.open) < 3)
    @rule(pages=st.integers(PAGES + 1, PAGES + 6))
    def open_record(self, pages: int) -> None:
        record = self.queue.admit(self.definition, self.descriptor(pages * PAGE))
        assert isinstance(record, Record)
        self.open.append(record)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), pages=st.integers(1, 4), at_once=st.booleans())
    def cut(self, which: int, pages: int, at_once: bool) -> None:
        record = self.open[which % len(self.open)]
        left = record.descriptor.nbytes - record.cut_nbytes
        piece = self.queue.cut(record, min(pages * PAGE, left))
        if piece is None or record.cut_nbytes == record.descriptor.nbytes:
            self.open.remove(record)
        if piece is None:
            return
        self.copying.append(piece)
        if at_once:
            self.copied(len(self.copying) - 1)

    @precondition(lambda self: self.copying)
    @rule(which=st.integers(0, 5))
    def copied(self, which: int) -> None:
        self.fill(self.copying.pop(which % len(self.copying)))

    @precondition(lambda self: self.copying)
    @rule(which=st.integers(0, 5))
    def fail_to_copy(self, which: int) -> None:
        piece = self.copying.pop(which % len(self.copying))
        assert isinstance(piece, PartCapture)
        self.queue.abort(piece, DropReason.INTERNAL)
        self.open = [record for record in self.open if record is not piece.record]

    @rule(limit=st.integers(1, 4))
    def send(self, limit: int) -> None:
        self.socket += [capture.descriptor for capture in self.queue.next_batch(limit)]

    @rule()
    def hear(self) -> None:
        for reply in self.daemon.session.take_replies():
            if isinstance(reply, Ack):
                self.queue.acknowledged(reply.ranges)
            elif isinstance(reply, Nack):
                self.queue.refused(reply.rows)

    # -- the daemon

    @rule(count=st.integers(1, 4))
    def read(self, count: int) -> None:
        items = [self.socket.popleft() for _ in range(min(count, len(self.socket)))]
        define = self.definition.define
        self.daemon.work += self.daemon.session.put([(item, define, None) for item in items])

    @rule(refusal=st.sampled_from([None, None, None, DropReason.DISK_FULL]))
    def work(self, refusal: DropReason | None) -> None:
        if not self.daemon.work:
            return
        item, _ = self.daemon.work.popleft()
        session, files = self.daemon.session, self.daemon.files
        data = bytes(self.arena[item.offset : item.offset + item.nbytes])
        if item.part is not None:
            same = data == content(item.record, item.part.first, item.nbytes)
            assert same, "the slot was given away"
            if item.part.first and item.nbytes and item.record not in files:
                refusal = DropReason.STORE_ERROR  # a part before it was refused
        if refusal is not None or not item.nbytes:
            files.pop(item.record, None)
        elif item.part is not None:
            files[item.record] = files.get(item.record, b"") + data
            data = files.pop(item.record) if item.ends_record else data
        if refusal is not None:
            session.refused(item.sequence, refusal, "")
            return
        if item.ends_record:
            assert item.record not in self.store, "a record is stored twice"
            same = data == content(item.record, 0, item.record_nbytes)
            assert same, "the record is not what was offered"
            self.store[item.record] = data
        session.committed(item.sequence)

    @rule(pages=st.integers(1, 3), rounds=st.integers(1, 5))
    def all_at_work(self, pages: int, rounds: int) -> None:
        """Open records go on, and all that is sent is worked off; the last answers are still on their way."""
        for _ in range(rounds):
            self.hear()
            for record in list(self.open):
                for _ in range(2):
                    if record in self.open:
                        self.cut(self.open.index(record), pages, True)
            self.send(64)
            self.read(64)
            while self.daemon.work:
                self.work(None)

    # -- faults

    @rule()
    def lose_connection(self) -> None:
        self.daemon.session.disconnect(self.connection)
        self.connect()

    @rule()
    def restart_daemon(self) -> None:
        self.daemon = self.new_daemon()

    # -- what holds

    @invariant()
    def the_rank_counts_exactly(self) -> None:
        now = self.queue.snapshot()
        assert now.offered == now.committed + now.in_flight + sum(now.dropped.values())

    def teardown(self) -> None:
        self.a_killed_rank_is_counted_exactly()
        self.finish()
        now = self.queue.snapshot()
        assert (now.in_flight, now.committed) == (0, len(self.store))
        totals = self.totals(in_work=None)
        assert balanced(totals, len(self.store))
        assert totals.in_flight == 0, "what is in flight is the rest, so the rest is nothing"
        assert not self.queue.busy
        assert self.queue.slots.take(PAGES * PAGE) is not None, "the arena is whole again"
        assert not self.daemon.files.keys(), "the daemon holds nothing of records that are over"

    def a_killed_rank_is_counted_exactly(self) -> None:
        """What if it were killed now: the daemon reads what was sent, with nobody to answer, and counts."""
        socket, store, session = list(self.socket), dict(self.store), self.daemon.session
        if self.queue.snapshot().offered % 2:  # in half of the runs: it is the end of this session
            return
        self.read(len(socket))
        while self.daemon.work:
            self.work(None)
        session.disconnect(self.connection)
        session.die()
        assert session.at_rest
        assert balanced(self.totals(in_work=session.records_in_work), len(self.store))
        assert self.store.keys() >= store.keys()
        self.connect()  # and if it only seemed dead, it goes on

    def finish(self) -> None:
        """Let every capture come to its end."""
        for _ in range(200):
            for record in list(self.open):
                self.cut(self.open.index(record), 1, True)
            while self.copying:
                self.copied(0)
            self.send(64)
            self.read(64)
            while self.daemon.work:
                self.work(None)
            self.hear()
            if not self.open and not self.queue.busy:
                return
        raise AssertionError("it does not come to an end")

    # -- helpers

    def descriptor(self, nbytes: int) -> Descriptor:
        return Descriptor(0, 0, nbytes, self.definition.id, (nbytes,), Moment())

    def fill(self, capture: Capture) -> None:
        assert capture.state == COPYING or isinstance(capture, PartCapture)
        item = capture.descriptor
        first = item.part.first if item.part is not None else 0
        self.arena[item.offset : item.offset + item.nbytes] = content(item.record, first, item.nbytes)
        self.queue.ready(capture)

    def new_daemon(self) -> Daemon:
        self.daemon = Daemon(Session(CLIENT, "run", [(record, record) for record in self.store]))
        self.connect()
        return self.daemon

    def connect(self) -> None:
        self.socket.clear()
        self.connection += 1
        hello = Hello(
            protocol=2, client=CLIENT, connection=self.connection, rank=0, arena_nbytes=len(self.arena)
        )
        assert self.daemon.session.connect(hello) is None
        self.queue.reconnected()

    def totals(self, in_work: int | None) -> SessionTotals:
        now = self.queue.snapshot()
        dropped = {DropReason(reason): count for reason, count in now.dropped.items()}
        page = PageCounters(now.offered, dropped)
        session = self.daemon.session
        return reconcile(page, len(session.done), session.refused_counts, in_work=in_work)


def balanced(totals: SessionTotals, stored: int) -> bool:
    lost = sum(totals.dropped.values())
    return totals.committed == stored and totals.offered == stored + totals.in_flight + lost


def test_records_in_parts_are_counted_exactly_whatever_happens_on_the_way() -> None:
    run_state_machine_as_test(Parts, settings=settings(max_examples=100, stateful_step_count=60))
