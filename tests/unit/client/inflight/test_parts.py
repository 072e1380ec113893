"""Tensors larger than a slot: cut in C order without being made whole, one capture in the queue, bounded waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capd_client.arena.allocator import GRANULE_NBYTES, SlotAllocator
from capd_client.inflight.capture import COPYING, Capture, Refused
from capd_client.inflight.counters import REASON_INDEX, Counters
from capd_client.inflight.definitions import Definition
from capd_client.inflight.parts import PartCapture, Record, part_nbytes
from capd_client.inflight.policies import Block
from capd_client.inflight.queue import Queue
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Descriptor, NackRow
from capd_client.session.session import Session
from capd_client.staging.in_parts import blocks
from tests.kit.client.device import FakeDevice, Rig
from tests.kit.client.peer import Peer, wait_until

PAGE = GRANULE_NBYTES
KEY = Key(quant_type="fp32", rank=0, tensor_name="x")


def make(pages: int = 4, max_block_s: float = 30.0) -> tuple[Queue, Definition]:
    queue = Queue(SlotAllocator(PAGE, pages * PAGE), Counters(), Block(max_block_s))
    return queue, queue.definitions.make(KEY, torch.uint8, None)


def admit(queue: Queue, definition: Definition, pages: int) -> Capture:
    descriptor = Descriptor(0, 0, pages * PAGE, definition.id, (pages * PAGE,), Moment(3))
    capture = queue.admit(definition, descriptor)
    assert isinstance(capture, Capture)
    return capture


def record_of(queue: Queue, definition: Definition, pages: int) -> Record:
    record = admit(queue, definition, pages)
    assert isinstance(record, Record)
    return record


def cut(queue: Queue, record: Record, pages: int = 1, *, ready: bool = True) -> PartCapture:
    piece = queue.cut(record, pages * PAGE)
    assert piece is not None
    if ready:
        queue.ready(piece)
    return piece


def sent(queue: Queue) -> list[Descriptor]:
    return [capture.descriptor for capture in queue.next_batch(64)]


def ack(queue: Queue, *sequences: int) -> None:
    queue.acknowledged([(sequence, sequence) for sequence in sequences])


def nack(queue: Queue, sequence: int, reason: DropReason = DropReason.DISK_FULL) -> None:
    queue.refused([NackRow(sequence, REASON_INDEX[reason], "refused")])


def is_whole_again(queue: Queue, pages: int = 4) -> bool:
    return not queue.busy and queue.slots.take(pages * PAGE) is not None


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


# -- the queue


def test_a_record_is_offered_in_flight_and_committed_once() -> None:
    queue, definition = make()
    record = record_of(queue, definition, 6)
    first, second = cut(queue, record, 2), cut(queue, record, 2)
    assert [(d.sequence, d.part) for d in sent(queue)] == [
        (first.descriptor.sequence, first.descriptor.part),
        (second.descriptor.sequence, second.descriptor.part),
    ]
    ack(queue, first.descriptor.sequence)
    now = queue.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (1, 0, 1)

    last = cut(queue, record, 2)
    assert (last.descriptor.record, last.descriptor.ends_record) == (record.descriptor.sequence, True)
    sent(queue)
    ack(queue, last.descriptor.sequence)
    now = queue.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (1, 1, 0)
    ack(queue, second.descriptor.sequence)
    assert is_whole_again(queue)
    assert queue.settled(record.descriptor.sequence)


def test_a_refused_part_drops_the_record_and_each_slot_waits_for_its_own_answer() -> None:
    queue, definition = make()
    record = record_of(queue, definition, 9)
    parts = [cut(queue, record) for _ in range(2)]
    sent(queue)
    unsent, copying = cut(queue, record), cut(queue, record, ready=False)

    nack(queue, parts[0].descriptor.sequence)
    now = queue.snapshot()
    assert (now.in_flight, now.dropped) == (0, {"disk_full": 1})
    row = queue.ledger.row(definition.id, DropReason.DISK_FULL)
    assert row is not None
    assert (row.count, row.nbytes) == (1, 9 * PAGE)
    assert queue.cut(record, PAGE) is None
    assert sent(queue) == [], "what was not sent is not sent any more"
    assert queue.slots.free_nbytes == 2 * PAGE, "the sent one and the one being copied keep their slots"
    nack(queue, parts[1].descriptor.sequence, DropReason.STORE_ERROR)
    queue.ready(copying)
    assert queue.snapshot().dropped == {"disk_full": 1}
    assert is_whole_again(queue)
    assert unsent.descriptor.sequence < copying.descriptor.sequence


def test_a_record_that_is_dropped_already_waits_for_nothing() -> None:
    queue, definition = make(pages=1, max_block_s=60.0)
    record = record_of(queue, definition, 3)
    part = cut(queue, record)
    sent(queue)
    nack(queue, part.descriptor.sequence)
    admit(queue, definition, 1)  # nothing frees its slot
    assert queue.cut(record, PAGE) is None
    assert record.patience_s == 60.0


def test_a_stop_by_capd_ctl_lets_a_record_under_way_wait_for_room() -> None:
    queue, definition = make()
    record = record_of(queue, definition, 5)
    first = cut(queue, record, 4)
    sent(queue)
    pieces: list[PartCapture | None] = []
    thread = threading.Thread(target=lambda: pieces.append(queue.cut(record, PAGE)))
    thread.start()
    wait_until(lambda: queue.waiting.count)

    queue.take_offers(False)
    ack(queue, first.descriptor.sequence)

    thread.join(10)
    assert pieces[0] is not None
    assert queue.snapshot().dropped == {}


@pytest.mark.parametrize("copying", [False, True])
def test_a_record_given_up_is_taken_back_by_a_part_without_bytes(copying: bool) -> None:
    queue, definition = make()
    record = record_of(queue, definition, 9)
    cut(queue, record)
    [known] = sent(queue)
    if copying:
        queue.abort(cut(queue, record, ready=False), DropReason.RING_FULL)
    else:
        queue.abort(record, DropReason.RING_FULL)
    queue.abort(record, DropReason.INTERNAL)  # again, by whoever else comes by
    now = queue.snapshot()
    assert (now.in_flight, now.dropped) == (0, {"ring_full": 1})

    [back] = sent(queue)
    assert (back.record, back.nbytes, back.ends_record) == (record.descriptor.sequence, 0, False)
    assert queue.busy
    queue.reconnected()
    assert [d.sequence for d in sent(queue)] == [known.sequence, back.sequence]
    ack(queue, known.sequence, back.sequence)
    assert is_whole_again(queue)
    assert queue.snapshot().committed == 0


def test_after_a_reconnect_parts_and_captures_are_sent_again_in_order() -> None:
    queue, definition = make(pages=8)
    record = record_of(queue, definition, 20)
    sequences = []
    for _ in range(3):
        sequences.append(cut(queue, record).descriptor.sequence)
        small = admit(queue, definition, 1)
        queue.ready(small)
        sequences.append(small.descriptor.sequence)
    sent(queue)
    ack(queue, sequences[2])
    queue.reconnected()
    assert [d.sequence for d in sent(queue)] == [s for s in sequences if s != sequences[2]]


def test_all_waits_of_a_record_share_one_budget_and_then_it_is_dropped_once() -> None:
    queue, definition = make(pages=2, max_block_s=1.0)
    record = record_of(queue, definition, 9)
    cut(queue, record)
    cut(queue, record)
    started = time.monotonic()

    def free_one() -> None:
        wait_until(lambda: queue.waiting.count)
        sequences = [descriptor.sequence for descriptor in sent(queue)]
        ack(queue, sequences[0])

    freeing = threading.Thread(target=free_one)
    freeing.start()
    cut(queue, record)
    freeing.join()
    assert record.patience_s < 1.0
    assert queue.cut(record, PAGE) is None
    assert time.monotonic() - started >= 1.0
    assert queue.snapshot().dropped == {"arena_full": 1}
    assert record.dropped is DropReason.ARENA_FULL


def test_what_is_left_of_a_wait_keeps_nobody_else_from_waiting() -> None:
    queue, definition = make(pages=1, max_block_s=0.3)
    record = record_of(queue, definition, 2)
    cut(queue, record)
    sent(queue)
    record.patience_s = 0.01
    assert queue.cut(record, PAGE) is None
    started = time.monotonic()
    refused = queue.admit(definition, Descriptor(0, 0, PAGE, definition.id, (PAGE,), Moment()))
    assert isinstance(refused, Refused)
    assert time.monotonic() - started >= 0.3


def test_closing_drops_a_record_once_and_ends_its_wait() -> None:
    queue, definition = make(pages=1, max_block_s=60)
    record = record_of(queue, definition, 3)
    cut(queue, record)
    taken: list[PartCapture | None] = []
    waiting = threading.Thread(target=lambda: taken.append(queue.cut(record, PAGE)))
    waiting.start()
    wait_until(lambda: queue.waiting.count)

    assert queue.close(DropReason.REJECTED) == 1
    waiting.join(10)
    assert taken == [None]
    now = queue.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (1, 0, {"rejected": 1})
    assert is_whole_again(queue, 1)


def test_a_slot_still_written_at_the_end_is_noticed() -> None:
    queue, definition = make()
    record = record_of(queue, definition, 6)
    cut(queue, record, ready=False)
    queue.abort(record, DropReason.INTERNAL)
    queue.close(DropReason.NOT_CONNECTED)
    assert queue.copying  # so the arena is not unmapped


def test_the_budget_of_a_step_takes_a_record_whole_or_not_at_all() -> None:
    slots = SlotAllocator(PAGE, 4 * PAGE)
    queue = Queue(slots, Counters(), Block(1.0), step_nbytes=10 * PAGE)
    definition = queue.definitions.make(KEY, torch.uint8, None)
    record_of(queue, definition, 6)
    descriptor = Descriptor(0, 0, 6 * PAGE, definition.id, (6 * PAGE,), Moment(3))
    assert isinstance(queue.admit(definition, descriptor), Refused)
    assert isinstance(queue.turn_away(definition, descriptor, DropReason.TOO_LARGE), Refused)
    assert queue.snapshot().dropped == {"step_budget": 2}


def test_of_a_record_given_up_the_budget_counts_what_was_sent() -> None:
    queue = Queue(SlotAllocator(PAGE, 4 * PAGE), Counters(), Block(1.0), step_nbytes=10 * PAGE)
    record = record_of(queue, queue.definitions.make(KEY, torch.uint8, None), 9)
    cut(queue, record)
    sent(queue)
    cut(queue, record)
    cut(queue, record, ready=False)
    queue.abort(record, DropReason.INTERNAL)
    iteration = record.descriptor.moment.iteration
    assert queue.step_budget.has_room(iteration, 9 * PAGE)
    assert not queue.step_budget.has_room(iteration, 9 * PAGE + 1)


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
    host, calls = session._stager._host, []  # type: ignore[attr-defined]
    fill = host.fill

    def breaks_later(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("a fault")
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(host, "fill", breaks_later)
    session.offer(torch.zeros(1 << 20), KEY, Moment())
    wait_until(lambda: not session.queue.busy)
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
    wait_until(lambda: r.device.run_all() or not r.session.queue.busy)
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
    assert any(piece.state == COPYING for piece in r.session.queue.parts.live.values())
    wait_until(lambda: r.device.run_all() or not r.session.queue.busy)
    slots = r.session.queue.slots
    assert slots.take(slots.capacity) is not None


def test_a_device_error_amid_the_parts_is_one_drop(peer: Peer, rig: Callable[..., Rig]) -> None:
    r = rig(FakeDevice(nbytes=8192, fault=RuntimeError("CUDA error")), policy="block", max_block_ms=500.0)
    r.offer(torch.zeros(70, 90))
    wait_until(lambda: r.stager.failed)
    wait_until(lambda: not r.session.queue.busy)
    now = r.session.snapshot()
    assert (now.offered, now.in_flight, sum(now.dropped.values())) == (1, 0, 1)
