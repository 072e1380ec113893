"""Tensors larger than a slot: cut in C order without being made whole, one capture in the books, bounded waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from client_peer import Peer, wait_until
from fake_device import FakeDevice, Rig
from hypothesis import given
from hypothesis import strategies as st

from capd_client.allocator import GRANULE_NBYTES, SlotAllocator
from capd_client.counter_page import DropReason
from capd_client.counting import REASON_INDEX, Counters
from capd_client.definitions import Definition
from capd_client.in_flight import COPYING, Capture
from capd_client.key import Key, Moment
from capd_client.large import blocks
from capd_client.parts import PartCapture, PartedBooks, Record, part_nbytes
from capd_client.protocol import Descriptor, NackRow
from capd_client.session import Session

PAGE = GRANULE_NBYTES
KEY = Key(quant_type="fp32", rank=0, tensor_name="x")


def make(pages: int = 4, max_block_s: float = 30.0) -> tuple[PartedBooks, Definition]:
    books = PartedBooks(SlotAllocator(PAGE, pages * PAGE), Counters(), max_block_s=max_block_s)
    return books, books.definitions.make(KEY, torch.uint8, None)


def admit(books: PartedBooks, definition: Definition, pages: int) -> Capture:
    descriptor = Descriptor(0, 0, pages * PAGE, definition.id, (pages * PAGE,), Moment(3))
    capture = books.admit(definition, descriptor)
    assert capture is not None
    return capture


def record_of(books: PartedBooks, definition: Definition, pages: int) -> Record:
    record = admit(books, definition, pages)
    assert isinstance(record, Record)
    return record


def cut(books: PartedBooks, record: Record, pages: int = 1, *, ready: bool = True) -> PartCapture:
    piece = books.cut(record, pages * PAGE)
    assert piece is not None
    if ready:
        books.ready(piece)
    return piece


def sent(books: PartedBooks) -> list[Descriptor]:
    return [capture.descriptor for capture in books.next_batch(64)]


def ack(books: PartedBooks, *sequences: int) -> None:
    books.acknowledged([(sequence, sequence) for sequence in sequences])


def nack(books: PartedBooks, sequence: int, reason: DropReason = DropReason.DISK_FULL) -> None:
    books.refused([NackRow(sequence, REASON_INDEX[reason], "refused")])


def is_whole_again(books: PartedBooks, pages: int = 4) -> bool:
    return not books.busy and books.slots.take(pages * PAGE) is not None


# -- cutting


@given(
    st.lists(st.integers(0, 7), max_size=4),
    st.integers(1, 40),
    st.permutations(range(4)),
    st.booleans(),
)
def test_pieces_are_the_tensor_in_c_order(
    shape: list[int], numel: int, order: list[int], sliced: bool
) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    tensor = tensor.permute([axis for axis in order if axis < len(shape)])
    if sliced and tensor.ndim:
        tensor = tensor[..., ::2]
    found = list(blocks(tensor, numel))
    assert all(0 < piece.numel() <= numel for piece in found)
    joined = torch.cat([piece.reshape(-1) for piece in found]) if found else torch.empty(0, dtype=torch.long)
    assert torch.equal(joined, tensor.reshape(-1))


def test_pieces_share_the_memory_and_are_not_needlessly_small() -> None:
    tensor = torch.zeros(100, 30).t()  # 30 rows of 100
    found = list(blocks(tensor, 250))
    assert [piece.numel() for piece in found] == [200] * 15
    assert {piece.untyped_storage().data_ptr() for piece in found} == {tensor.untyped_storage().data_ptr()}
    assert [piece.numel() for piece in blocks(tensor.contiguous(), 250)] == [250] * 12


def test_a_part_is_a_quarter_of_the_slots_at_most() -> None:
    assert part_nbytes(1 << 30) == 64 << 20
    assert part_nbytes((1 << 20) - PAGE) == 63 * PAGE
    assert part_nbytes(PAGE) == PAGE


# -- the books


def test_a_record_is_offered_in_flight_and_committed_once() -> None:
    books, definition = make()
    record = record_of(books, definition, 6)
    first, second = cut(books, record, 2), cut(books, record, 2)
    assert [(d.sequence, d.part) for d in sent(books)] == [
        (first.descriptor.sequence, first.descriptor.part),
        (second.descriptor.sequence, second.descriptor.part),
    ]
    ack(books, first.descriptor.sequence)
    now = books.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (1, 0, 1)

    last = cut(books, record, 2)
    assert (last.descriptor.record, last.descriptor.ends_record) == (record.descriptor.sequence, True)
    sent(books)
    ack(books, last.descriptor.sequence)
    now = books.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (1, 1, 0)
    ack(books, second.descriptor.sequence)
    assert is_whole_again(books)
    assert books.settled(record.descriptor.sequence)


def test_a_refused_part_drops_the_record_and_each_slot_waits_for_its_own_answer() -> None:
    books, definition = make()
    record = record_of(books, definition, 9)
    parts = [cut(books, record) for _ in range(2)]
    sent(books)
    unsent, copying = cut(books, record), cut(books, record, ready=False)

    nack(books, parts[0].descriptor.sequence)
    now = books.snapshot()
    assert (now.in_flight, now.dropped) == (0, {"disk_full": 1})
    row = books.ledger.row(definition.id, DropReason.DISK_FULL)
    assert row is not None
    assert (row.count, row.nbytes) == (1, 9 * PAGE)
    assert books.cut(record, PAGE) is None
    assert sent(books) == [], "what was not sent is not sent any more"
    assert books.slots.free_nbytes == 2 * PAGE, "the sent one and the one being copied keep their slots"
    nack(books, parts[1].descriptor.sequence, DropReason.STORE_ERROR)
    books.ready(copying)
    assert books.snapshot().dropped == {"disk_full": 1}
    assert is_whole_again(books)
    assert unsent.descriptor.sequence < copying.descriptor.sequence


def test_a_record_that_is_dropped_already_waits_for_nothing() -> None:
    books, definition = make(pages=1, max_block_s=60.0)
    record = record_of(books, definition, 3)
    part = cut(books, record)
    sent(books)
    nack(books, part.descriptor.sequence)
    admit(books, definition, 1)  # nothing frees its slot
    assert books.cut(record, PAGE) is None
    assert record.patience_s == 60.0


def test_a_stop_by_capd_ctl_lets_a_record_under_way_wait_for_room() -> None:
    books, definition = make()
    record = record_of(books, definition, 5)
    first = cut(books, record, 4)
    sent(books)
    pieces: list[PartCapture | None] = []
    thread = threading.Thread(target=lambda: pieces.append(books.cut(record, PAGE)))
    thread.start()
    wait_until(lambda: books.waiting.count)

    books.take_offers(False)
    ack(books, first.descriptor.sequence)

    thread.join(10)
    assert pieces[0] is not None
    assert books.snapshot().dropped == {}


@pytest.mark.parametrize("copying", [False, True])
def test_a_record_given_up_is_taken_back_by_a_part_without_bytes(copying: bool) -> None:
    books, definition = make()
    record = record_of(books, definition, 9)
    cut(books, record)
    [known] = sent(books)
    if copying:
        books.abort(cut(books, record, ready=False), DropReason.RING_FULL)
    else:
        books.abort(record, DropReason.RING_FULL)
    books.abort(record, DropReason.INTERNAL)  # again, by whoever else comes by
    now = books.snapshot()
    assert (now.in_flight, now.dropped) == (0, {"ring_full": 1})

    [back] = sent(books)
    assert (back.record, back.nbytes, back.ends_record) == (record.descriptor.sequence, 0, False)
    assert books.busy
    books.reconnected()
    assert [d.sequence for d in sent(books)] == [known.sequence, back.sequence]
    ack(books, known.sequence, back.sequence)
    assert is_whole_again(books)
    assert books.snapshot().committed == 0


def test_after_a_reconnect_parts_and_captures_are_sent_again_in_order() -> None:
    books, definition = make(pages=8)
    record = record_of(books, definition, 20)
    sequences = []
    for _ in range(3):
        sequences.append(cut(books, record).descriptor.sequence)
        small = admit(books, definition, 1)
        books.ready(small)
        sequences.append(small.descriptor.sequence)
    sent(books)
    ack(books, sequences[2])
    books.reconnected()
    assert [d.sequence for d in sent(books)] == [s for s in sequences if s != sequences[2]]


def test_all_waits_of_a_record_share_one_budget_and_then_it_is_dropped_once() -> None:
    books, definition = make(pages=2, max_block_s=1.0)
    record = record_of(books, definition, 9)
    cut(books, record)
    cut(books, record)
    started = time.monotonic()

    def free_one() -> None:
        wait_until(lambda: books.waiting.count)
        sequences = [descriptor.sequence for descriptor in sent(books)]
        ack(books, sequences[0])

    freeing = threading.Thread(target=free_one)
    freeing.start()
    cut(books, record)
    freeing.join()
    assert record.patience_s < 1.0
    assert books.cut(record, PAGE) is None
    assert time.monotonic() - started >= 1.0
    assert books.snapshot().dropped == {"arena_full": 1}
    assert record.dropped is DropReason.ARENA_FULL


def test_what_is_left_of_a_wait_keeps_nobody_else_from_waiting() -> None:
    books, definition = make(pages=1, max_block_s=0.3)
    record = record_of(books, definition, 2)
    cut(books, record)
    sent(books)
    record.patience_s = 0.01
    assert books.cut(record, PAGE) is None
    started = time.monotonic()
    assert books.admit(definition, Descriptor(0, 0, PAGE, definition.id, (PAGE,), Moment())) is None
    assert time.monotonic() - started >= 0.3


def test_closing_drops_a_record_once_and_ends_its_wait() -> None:
    books, definition = make(pages=1, max_block_s=60)
    record = record_of(books, definition, 3)
    cut(books, record)
    taken: list[PartCapture | None] = []
    waiting = threading.Thread(target=lambda: taken.append(books.cut(record, PAGE)))
    waiting.start()
    wait_until(lambda: books.waiting.count)

    assert books.close(DropReason.REJECTED) == 1
    waiting.join(10)
    assert taken == [None]
    now = books.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (1, 0, {"rejected": 1})
    assert is_whole_again(books, 1)


def test_a_slot_still_written_at_the_end_is_noticed() -> None:
    books, definition = make()
    record = record_of(books, definition, 6)
    cut(books, record, ready=False)
    books.abort(record, DropReason.INTERNAL)
    books.close(DropReason.NOT_CONNECTED)
    assert books.copying  # so the arena is not unmapped


def test_the_budget_of_a_step_takes_a_record_whole_or_not_at_all() -> None:
    slots = SlotAllocator(PAGE, 4 * PAGE)
    books = PartedBooks(slots, Counters(), max_block_s=1.0, step_nbytes=10 * PAGE)
    definition = books.definitions.make(KEY, torch.uint8, None)
    record_of(books, definition, 6)
    descriptor = Descriptor(0, 0, 6 * PAGE, definition.id, (6 * PAGE,), Moment(3))
    assert books.admit(definition, descriptor) is None
    assert books.turn_away(definition, descriptor, DropReason.TOO_LARGE) is None
    assert books.snapshot().dropped == {"step_budget": 2}


def test_of_a_record_given_up_the_budget_counts_what_was_sent() -> None:
    books = PartedBooks(SlotAllocator(PAGE, 4 * PAGE), Counters(), max_block_s=1.0, step_nbytes=10 * PAGE)
    record = record_of(books, books.definitions.make(KEY, torch.uint8, None), 9)
    cut(books, record)
    sent(books)
    cut(books, record)
    cut(books, record, ready=False)
    books.abort(record, DropReason.INTERNAL)
    iteration = record.descriptor.moment.iteration
    assert books.step_budget.has_room(iteration, 9 * PAGE)
    assert not books.step_budget.has_room(iteration, 9 * PAGE + 1)


# -- the way of a tensor


def assembled(peer: Peer) -> list[bytes]:
    """The records in parts, as the daemon would put them together."""
    found: dict[int, bytes] = {}
    for record in peer.records:
        item = record.descriptor
        assert item.part is not None
        assert item.part.first == len(found.get(item.record, b""))
        found[item.record] = found.get(item.record, b"") + record.data
    return list(found.values())


@pytest.mark.parametrize("threads", [1, 2])
def test_host_tensors_go_in_parts_with_the_bytes_they_had(
    peer: Peer, make_session: Callable[..., Session], threads: int
) -> None:
    session = make_session(policy="block", strict=True)
    tensors = [torch.randn(700, 500), torch.randn(500, 900).t(), torch.randn(1, 300_000).expand(2, -1)]
    torch.set_num_threads(threads)
    for tensor in tensors:
        session.offer(tensor, KEY, Moment())
    session.offer(tensors[1], KEY, Moment(), cast_to=torch.float64, metadata='{"a": 1}')
    assert session.flush(30)
    assert session.snapshot().committed == 4
    expected = [*tensors, tensors[1].double()]
    assert assembled(peer) == [tensor.contiguous().numpy().tobytes() for tensor in expected]
    last = peer.records[-1].descriptor
    assert (last.shape, last.metadata) == ((900, 500), b'{"a": 1}')


def test_an_error_amid_the_parts_is_counted_once(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(policy="block")
    host, calls = session._stage.__self__._host, []  # type: ignore[attr-defined]
    fill = host.fill

    def breaks_later(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("a fault")
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(host, "fill", breaks_later)
    session.offer(torch.zeros(1 << 20), KEY, Moment())
    wait_until(lambda: not session.books.busy)
    now = session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (1, 0, {"internal": 1})
    assert peer.records[-1].descriptor.nbytes == 0


def test_a_device_tensor_larger_than_the_ring_passes_through_it(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=8192), policy="block", max_block_ms=60_000.0)
    tensor = torch.randn(70, 90)
    expected = tensor.t().double().contiguous().numpy().tobytes()
    capture = threading.Thread(target=r.offer, args=(tensor.t(), torch.float64))
    capture.start()
    while capture.is_alive():
        r.device.run_all()
        time.sleep(0.001)
    tensor.fill_(-1)
    wait_until(lambda: r.device.run_all() or not r.stager.pending)
    assert r.session.flush(30)
    assert assembled(peer) == [expected]
    assert r.session.snapshot().committed == 1
    assert max(r.device.sizes) <= 4096


def test_a_held_device_tensor_larger_than_the_arena_needs_no_ring(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    r = rig(FakeDevice(nbytes=0), policy="block", max_block_ms=60_000.0)
    tensor = torch.randn(300_001)
    capture = threading.Thread(target=r.offer, args=(tensor,), kwargs={"immutable": True})
    capture.start()
    while capture.is_alive():
        r.device.run_all()
        time.sleep(0.001)
    wait_until(lambda: r.device.run_all() or not r.stager.pending)
    assert r.session.flush(30)
    assert assembled(peer) == [tensor.numpy().tobytes()]


def test_a_held_device_tensor_that_changes_amid_the_parts_is_one_drop(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    r = rig(FakeDevice(nbytes=0), policy="block", max_block_ms=60_000.0)
    tensor = torch.zeros(300_001)
    capture = threading.Thread(target=r.offer, args=(tensor,), kwargs={"immutable": True})
    capture.start()
    r.started(4)  # as many as the arena takes; none is performed yet
    tensor.fill_(1)
    while capture.is_alive():
        r.device.run_all()
        time.sleep(0.001)
    wait_until(lambda: r.device.run_all() or not r.session.books.busy)
    now = r.session.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (1, 0, {"mutated": 1})


def test_a_ring_that_stays_full_ends_the_record_within_its_time(
    peer: Peer, rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    r = rig(FakeDevice(nbytes=8192), policy="block", max_block_ms=300.0)
    started = time.monotonic()
    r.offer(torch.zeros(70, 90))
    assert time.monotonic() - started < 20
    now = r.session.snapshot()
    assert (now.in_flight, now.dropped) == (0, {"ring_full": 1})
    assert "CAPD_MAX_BLOCK_MS" in caplog.text
    r.started(1)
    assert any(piece.state == COPYING for piece in r.session.books._pieces.values())
    wait_until(lambda: r.device.run_all() or not r.session.books.busy)
    slots = r.session.books.slots
    assert slots.take(slots.capacity) is not None


def test_a_device_error_amid_the_parts_is_one_drop(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=8192, fault=RuntimeError("CUDA error")), policy="block", max_block_ms=500.0)
    r.offer(torch.zeros(70, 90))
    wait_until(lambda: r.stager.failed)
    wait_until(lambda: not r.session.books.busy)
    now = r.session.snapshot()
    assert (now.offered, now.in_flight, sum(now.dropped.values())) == (1, 0, 1)
