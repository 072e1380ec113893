"""The journal in a rank's arena: the daemon takes what is ready there, once, whatever else stands there."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capd.server.pipeline.jobs import RecordJob
from capd.server.rank.arena import Arena
from capd.server.rank.rank import RankSession
from capd.server.rank.session import Session
from capd.server.rank.steering import RunSteering
from capd_client.arena.allocator import SlotAllocator
from capd_client.arena.arena import Arena as ClientArena
from capd_client.inflight.capture import READY, Capture
from capd_client.inflight.counters import Counters
from capd_client.inflight.definitions import Definition
from capd_client.inflight.parts import Record
from capd_client.inflight.policies import Block
from capd_client.inflight.queue import Queue
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.journal_layout import (
    CELL_NBYTES,
    JOURNAL_CELLS,
    JOURNAL_DEFINED_NBYTES,
    JOURNAL_LARGE,
    JOURNAL_START,
    JOURNAL_USED_CELLS,
    JOURNAL_USED_LARGE,
    LARGE_NBYTES,
    USUAL,
    USUAL_IS_LEAF,
    USUAL_NO_PAYLOAD,
    USUAL_REQUIRES_GRAD,
    USUAL_STATISTICS,
    WORD_NBYTES,
    cell_word,
)
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Hello, Put, encode

NBYTES = 64  # of each capture
KEY = Key(quant_type="bf16", rank=0, tensor_name="x")
CLIENT = b"c" * 16


@dataclass
class Both:
    """A rank's side and the daemon's over one arena, in one process."""

    queue: Queue
    arena: ClientArena
    rank: RankSession
    hello: Hello
    seen: Arena
    jobs: list[RecordJob] = field(default_factory=list)

    @property
    def definition(self) -> Definition:
        return self.queue.define(KEY, torch.float32, None)

    @property
    def cells(self) -> tuple[int, int]:
        """How many small and large ones hold a descriptor."""
        layout, memory = self.arena.layout, memoryview(self.arena.buffer).cast("B")
        small = memory[layout.cells_at : layout.large_at].cast("Q")[CELL_NBYTES // 8 - 1 :: CELL_NBYTES // 8]
        large = memory[layout.large_at : layout.definitions_at].cast("Q")[
            LARGE_NBYTES // 8 - 1 :: LARGE_NBYTES // 8
        ]
        return sum(map(bool, small)), sum(map(bool, large))

    def capture(
        self, *, ready: bool = True, metadata: bytes = b"", key: Key = KEY, usual: bool = False
    ) -> Capture:
        """What `Stager` does, with bytes that tell captures apart."""
        definition = self.queue.define(key, torch.float32, None)
        descriptor = Descriptor(0, 0, NBYTES, definition.id, (NBYTES // 4,), Moment(), metadata=metadata)
        capture = self.queue.admit(definition, descriptor)
        assert isinstance(capture, Capture)
        self.write(descriptor)
        if usual:
            self.queue.journal.keep_usual(capture, descriptor.shape, descriptor.moment, USUAL)
            capture.state = READY
        elif ready:
            self.queue.ready(capture)
        return capture

    def write(self, descriptor: Descriptor) -> None:
        memory = memoryview(self.arena.buffer).cast("B")
        fill = bytes([descriptor.sequence % 251]) * descriptor.nbytes
        memory[descriptor.offset : descriptor.offset + descriptor.nbytes] = fill

    def die(self) -> list[int]:
        """The rank is gone: the sequences that are submitted because of that."""
        before = len(self.jobs)
        assert self.rank.connect(self.hello, self.seen, os.eventfd(1)) is None
        self.rank.disconnect(self.hello.connection)
        assert self.rank.wait_recovered(30)
        assert self.rank.died
        return [job.sequence for job in self.jobs[before:]]


def _extend(jobs: list[RecordJob], *new: RecordJob) -> None:
    jobs.extend(new)


@pytest.fixture
def make() -> Iterator[Callable[..., Both]]:
    made: list[Both] = []

    def make(queue: Callable[[SlotAllocator, Counters], Queue] = Queue, nbytes: int = 1 << 20) -> Both:
        arena, counters = ClientArena(nbytes), Counters()
        counters.attach(arena.words)
        own = queue(SlotAllocator(arena.start, arena.nbytes - arena.start), counters)
        own.journal.attach(arena.buffer, arena.layout)
        hello = Hello(protocol=2, client=CLIENT, connection=1, rank=0, arena_nbytes=arena.nbytes)
        seen, jobs = Arena(arena.fd, arena.nbytes), list[RecordJob]()
        submit = partial(_extend, jobs)
        rank = RankSession(Session(CLIENT, "run"), hello, seen, submit, lambda *_: None, 0, RunSteering())
        made.append(Both(own, arena, rank, hello, seen, jobs))
        return made[-1]

    yield make
    for both in made:
        both.jobs.clear()
        both.rank.release()
        both.arena.words.release()
        both.arena.close()
    made.clear()  # with them goes what the daemon's side has mapped


def test_what_is_ready_and_not_settled_is_taken_with_its_bytes(make: Callable[..., Both]) -> None:
    both = make()
    captures = [both.capture(ready=number != 3) for number in range(1, 9)]
    for capture in both.queue.next_batch(2):
        assert capture.sent
    both.queue.acknowledged([(1, 1)])
    both.queue.abort(captures[2], DropReason.INTERNAL)

    assert both.die() == [2, 4, 5, 6, 7, 8]
    for job in both.jobs:
        assert bytes(job.read()) == bytes([job.sequence]) * NBYTES
        assert (job.define.key, job.define.dtype) == (KEY, "float32")


def test_a_capture_that_is_settled_leaves_no_cell(make: Callable[..., Both]) -> None:
    both = make()
    for metadata in (b"", b'{"a": "' + b"x" * 3000 + b'"}') * 3:
        both.capture(metadata=metadata)
    assert both.cells == (3, 3)
    for capture in both.queue.next_batch(64):
        both.queue.acknowledged([(capture.descriptor.sequence, capture.descriptor.sequence)])
    assert both.cells == (0, 0)
    assert both.die() == []


def test_large_metadata_and_later_definitions_are_taken_too(make: Callable[..., Both]) -> None:
    both = make()
    text = b'{"a": "' + b"x" * 4000 + b'"}'
    both.capture(metadata=text)
    for number in range(200):
        both.capture(key=Key(quant_type="bf16", rank=0, tensor_name=f"y{number}"))
    assert both.die() == list(range(1, 202))
    assert both.jobs[0].descriptor.metadata == text
    assert {job.define.key.tensor_name for job in both.jobs} == {"x", *(f"y{n}" for n in range(200))}


def test_what_came_by_put_is_not_taken_twice(make: Callable[..., Both]) -> None:
    both = make()
    captures = [both.capture() for _ in range(6)]
    assert both.rank.connect(both.hello, both.seen, None) is None
    assert both.rank.apply(1, lambda session: session.define(both.definition.define, 10))
    assert both.rank.put(1, Put([capture.descriptor for capture in captures[:4]]))
    both.rank.committed([1])
    both.rank.refused(2, DropReason.DISK_FULL, "full")  # 3 and 4 are in work
    both.hello.connection = 2
    assert both.die() == [5, 6]
    both.rank.committed([3])
    assert [job.sequence for job in both.jobs] == [1, 2, 3, 4, 5, 6]


def test_a_rank_that_comes_back_repeats_what_was_taken_and_it_is_acknowledged(
    make: Callable[..., Both],
) -> None:
    both = make()
    captures = [both.capture() for _ in range(3)]
    assert both.die() == [1, 2, 3]
    for job in both.jobs:
        both.rank.committed([job.sequence])
    both.hello.connection = 2
    assert both.rank.connect(both.hello, both.seen, None) is None
    assert both.rank.apply(2, lambda session: session.define(both.definition.define, 10))
    assert both.rank.put(2, Put([capture.descriptor for capture in captures]))
    assert len(both.jobs) == 3
    assert both.rank.session.has_replies


def test_what_a_rank_gave_up_at_its_end_stays_in_the_journal(make: Callable[..., Both]) -> None:
    both = make()
    both.capture()
    both.capture(ready=False)
    both.capture()
    assert both.queue.close(DropReason.NOT_CONNECTED) == 3
    both.queue.journal.close()
    assert both.die() == [1, 3]
    for job in both.jobs:
        both.rank.committed([job.sequence])
    row = both.rank.row()
    assert (row.offered, row.committed, row.dropped) == (3, 2, {"not_connected": 1})


def test_parts_of_a_record_that_is_whole_are_taken_and_of_one_that_is_not_forgotten(
    make: Callable[..., Both],
) -> None:
    both = make(lambda slots, counters: Queue(slots, counters, Block(1.0)), nbytes=68 << 10)
    queue = both.queue
    assert isinstance(queue, Queue)
    for pieces in (2, 1):
        definition, nbytes = both.definition, queue.slots.capacity + 4096
        descriptor = Descriptor(0, 0, nbytes, definition.id, (nbytes // 4,), Moment())
        record = queue.admit(definition, descriptor)
        assert isinstance(record, Record)
        for piece_nbytes in (nbytes - 4096 * 8, 4096 * 8)[:pieces]:
            queue.slots = SlotAllocator(both.arena.start, both.arena.nbytes - both.arena.start)
            piece = queue.cut(record, piece_nbytes)
            assert piece is not None
            both.write(piece.descriptor)
            queue.ready(piece)
    # sequences: record 1, parts 2 and 3; record 4, part 5
    assert both.die() == [2, 3, 5]
    for job in both.jobs:
        both.rank.committed([job.sequence])
    row = both.rank.row()
    assert (row.offered, row.committed, row.dropped) == (2, 1, {"rank_died": 1})


def test_after_a_restart_the_first_cells_are_used_again(make: Callable[..., Both]) -> None:
    both = make()
    text = b'{"a": "' + b"x" * 3000 + b'"}'
    for metadata in (b"", text) * 100:
        both.capture(metadata=metadata)
    both.queue.next_batch(200)
    both.queue.acknowledged([(1, 200)])
    with both.queue.lock:
        both.queue.journal.restart()
    words = both.arena.words
    assert (words[JOURNAL_USED_CELLS], words[JOURNAL_USED_LARGE]) == (0, 0)
    for usual, metadata in ((False, b""), (False, text), (True, b"")):
        both.capture(metadata=metadata, usual=usual)
    assert (words[JOURNAL_USED_CELLS], words[JOURNAL_USED_LARGE]) == (64, 64)
    assert both.die() == [201, 202, 203]


def test_where_no_cell_is_free_captures_go_on(make: Callable[..., Both]) -> None:
    both = make()
    room = both.arena.layout.cells
    for _ in range(room + 10):
        both.capture()
    assert both.cells == (room, 0)
    both.queue.next_batch(5)
    both.queue.acknowledged([(1, 5)])
    assert both.capture().cell


def test_an_arena_fills_up_where_a_quarter_of_its_slots_is_taken_wherever_they_begin(
    make: Callable[..., Both],
) -> None:
    both = make()
    start, quarter = both.arena.start, (both.arena.nbytes - both.arena.start) // 4
    assert start > both.arena.nbytes // 4
    assert [both.seen.fills_up(at) for at in (start, start + quarter, start + quarter + 64)] == [
        False,
        False,
        True,
    ]
    assert not both.rank.is_pressed([both.capture().descriptor])


# What a rank may have left there


@pytest.mark.parametrize("kind", ["small", "large", "usual"])
def test_a_cell_that_was_torn_at_any_byte_is_left_out(make: Callable[..., Both], kind: str) -> None:
    both = make()
    metadata = b'{"a": "' + b"x" * 200 + b'"}' if kind == "large" else b""
    torn = both.capture(metadata=metadata, usual=kind == "usual")
    memory = torn.cell.cast("B")
    whole, size = bytes(memory), len(memory)
    length = int.from_bytes(whole[-WORD_NBYTES:], "little") & 0xFFFF_FFFF
    if kind == "usual":  # without its commit word it is nothing, which is written last
        length = 0
    journal = both.seen.journal()
    assert journal is not None
    for cut in (*range(length), *range(size - WORD_NBYTES, size)):
        memory[:] = whole[:cut] + bytes(size - cut)
        if bytes(memory) != whole:
            assert list(journal.batches(journal.find())) == [], cut
    memory[:] = whole
    assert both.die() == [1]


_numbers = st.sampled_from([0, 1, 7, 2**31, 2**32, 2**63 - 1])
_index = st.none() | _numbers
_moments = st.builds(Moment, *[_numbers] * 3, *[_index] * 3, _numbers, _numbers, st.booleans())


@settings(deadline=None)
@given(_moments, st.lists(st.integers(0, 2**40), max_size=8), *[st.booleans()] * 4)
def test_a_usual_capture_is_kept_as_it_is_described(
    moment: Moment, shape: list[int], grad: bool, leaf: bool, both_kinds: bool, payload: bool
) -> None:
    arena, counters = ClientArena(1 << 16), Counters()
    queue = Queue(SlotAllocator(0, 1 << 20), counters)
    try:
        counters.attach(arena.words)
        queue.journal.attach(arena.buffer, arena.layout)
        flags = grad * USUAL_REQUIRES_GRAD | leaf * USUAL_IS_LEAF | both_kinds * USUAL_STATISTICS
        told = Descriptor(
            2**40 + 5, 2**35, 2**34, 17, tuple(shape), moment, "cpu", grad, leaf, payload=payload, statistics=both_kinds
        )  # fmt: skip
        capture = Capture(told, None, (0, 0, None))  # type: ignore[arg-type]
        queue.journal.keep_usual(
            capture, told.shape, moment, USUAL | flags | (not payload) * USUAL_NO_PAYLOAD
        )
        journal = Arena(arena.fd, arena.nbytes).journal()
        assert journal is not None
        assert list(journal.batches(journal.find())) == [[told]]
    finally:
        arena.words.release()
        arena.close()


def test_a_usual_cell_with_numbers_that_cannot_be_is_left_out(make: Callable[..., Both]) -> None:
    both = make()
    cell = both.capture(usual=True).cell
    whole = cell.tolist()
    journal = both.seen.journal()
    assert journal is not None
    for word, value in [(0, 2**32 + 1), (3, 2**40), (4, 2**63), (5, 2**64 - 1), (9, 2**63)]:
        cell[word] = value
        assert [
            item for batch in journal.batches(journal.find()) for item in batch if item.sequence == 1
        ] == []
        cell[word] = whole[word]
    for ndim in (7, 255):
        cell[-1] = whole[-1] | ndim
        assert list(journal.batches(journal.find())) == []
    cell[-1] = whole[-1]
    assert both.die() == [1]


def _forge(both: Both, number: int, item: Descriptor) -> None:
    """Write a cell as a rank may that keeps to no rule."""
    data = encode(item)  # type: ignore[arg-type]
    at = both.arena.layout.cells_at + number * CELL_NBYTES
    memory = memoryview(both.arena.buffer).cast("B")
    memory[at : at + len(data)] = data
    memory[at + CELL_NBYTES - WORD_NBYTES : at + CELL_NBYTES] = cell_word(len(data), item.sequence).to_bytes(
        8, "little"
    )
    both.arena.words[JOURNAL_USED_CELLS] = max(both.arena.words[JOURNAL_USED_CELLS], number + 1)


def test_descriptors_that_a_put_would_refuse_are_refused(make: Callable[..., Both]) -> None:
    both = make()
    good = both.capture().descriptor
    wrong: list[dict[str, object]] = [
        {"offset": 0}, {"offset": both.arena.nbytes - 8}, {"nbytes": 1 << 62}, {"shape": (1 << 40, 1 << 40)},
        {"shape": (3,)}, {"row_offset": 4100}, {"order": (1,)}, {"metadata": b"{"}, {"row_offset": 1 << 62},
    ]  # fmt: skip
    for number, change in enumerate(wrong, 1):
        fields = {name: getattr(good, name) for name in good.__struct_fields__}
        _forge(both, number, Descriptor(**{**fields, "sequence": 100 + number, **change}))
    _forge(both, 20, Descriptor(200, good.offset, NBYTES, 77, (16,), Moment()))  # nothing says what 77 is
    _forge(
        both, 21, Descriptor(1, good.offset + 64, NBYTES, good.key_id, (16,), Moment())
    )  # 1 is there already

    assert both.die() == [1]
    assert both.rank.session.refused_counts == {DropReason.BAD_DESCRIPTOR: len(wrong)}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (JOURNAL_START, 0), (JOURNAL_START, 1 << 63), (JOURNAL_CELLS, 0), (JOURNAL_CELLS, 1 << 62),
        (JOURNAL_LARGE, 1 << 40), (JOURNAL_LARGE, 0), (JOURNAL_USED_CELLS, 0), (JOURNAL_DEFINED_NBYTES, 0),
    ],
)  # fmt: skip
def test_words_that_make_no_sense_are_no_journal(make: Callable[..., Both], word: int, value: int) -> None:
    both = make()
    both.capture()
    both.arena.words[word] = value
    assert both.die() == []


def test_a_rank_that_claims_to_have_used_all_of_it_costs_no_pages(make: Callable[..., Both]) -> None:
    both = make()
    both.capture()
    words, layout = both.arena.words, both.arena.layout
    before = os.fstat(both.arena.fd).st_blocks
    words[JOURNAL_USED_CELLS] = words[JOURNAL_USED_LARGE] = words[JOURNAL_DEFINED_NBYTES] = (1 << 64) - 1
    assert layout.end > 64 << 20
    assert both.die() == [1]
    assert os.fstat(both.arena.fd).st_blocks == before


def test_two_definitions_of_one_id_are_one(make: Callable[..., Both]) -> None:
    both = make()
    first = both.capture()
    other = Define(id=first.descriptor.key_id, key=Key(quant_type="x", rank=0, tensor_name="y"), dtype="int8")
    both.queue.journal.define(other)
    assert both.die() == [1]
    assert both.jobs[0].define.key == KEY


def test_noise_in_the_journal_harms_nobody(make: Callable[..., Both]) -> None:
    noise = random.Random(5)
    for _ in range(20):
        both = make()
        for _ in range(40):
            both.capture()
        memory, layout = memoryview(both.arena.buffer).cast("B"), both.arena.layout
        for _ in range(noise.randrange(1, 200)):
            first, nbytes = noise.choice([(layout.cells_at, 40 * CELL_NBYTES), (layout.definitions_at, 200)])
            at = first + noise.randrange(nbytes)
            memory[at] = noise.randrange(256)
        taken = both.die()
        assert taken == sorted(set(taken))
        for job in both.jobs:
            assert bytes(job.read()) == bytes([job.sequence]) * NBYTES
