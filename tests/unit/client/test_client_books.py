"""The books: exact at every moment, in order, and waiting only under policy block and only so long."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from client_peer import wait_until

from capd_client.allocator import SlotAllocator
from capd_client.books import Books
from capd_client.counter_page import DropReason
from capd_client.counting import REASON_INDEX, Counters
from capd_client.definitions import Definition
from capd_client.in_flight import Capture
from capd_client.key import Key, Moment
from capd_client.protocol import Descriptor, NackRow
from capd_client.step_budget import StepBudget

PAGE = 4096


def make(
    pages: int = 4,
    max_block_s: float = 0.0,
    step_nbytes: int | None = None,
    kind: type[Books] = Books,
) -> tuple[Books, Definition]:
    slots = SlotAllocator(PAGE, pages * PAGE)
    books = kind(slots, Counters(), max_block_s=max_block_s, step_nbytes=step_nbytes)
    key = Key(quant_type="bf16", rank=0, tensor_name="x")
    return books, books.definitions.make(key, torch.float32, None)


def admit(books: Books, definition: Definition, nbytes: int = PAGE, iteration: int = 0) -> Capture | None:
    descriptor = Descriptor(0, 0, nbytes, definition.id, (nbytes // 4,), Moment(iteration))
    return books.admit(definition, descriptor)


def exact(books: Books) -> bool:
    now = books.snapshot()
    return now.offered == now.committed + now.in_flight + sum(now.dropped.values())


def send_all(books: Books) -> list[int]:
    sequences: list[int] = []
    while batch := books.next_batch(3):
        sequences += [capture.descriptor.sequence for capture in batch]
    return sequences


def test_every_end_of_a_capture_keeps_the_sum() -> None:
    books, definition = make(pages=4)
    captures = [admit(books, definition, iteration=i) for i in range(6)]
    assert [capture is not None for capture in captures] == [True] * 4 + [False] * 2
    assert exact(books)
    for capture in captures[:3]:
        assert capture is not None
        books.ready(capture)
    assert captures[3] is not None
    books.abort(captures[3], DropReason.RING_FULL)

    assert send_all(books) == [1, 2, 3]
    books.acknowledged([(1, 1)])
    books.refused([NackRow(2, REASON_INDEX[DropReason.DISK_FULL], "full")])

    now = books.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (6, 1, 1)
    assert now.dropped == {"arena_full": 2, "ring_full": 1, "disk_full": 1}
    assert exact(books)
    row = books.ledger.row(definition.id, DropReason.ARENA_FULL)
    assert row is not None
    assert (row.count, row.nbytes, row.first_iteration, row.last_iteration) == (2, 2 * PAGE, 4, 5)


def test_a_capture_still_being_copied_holds_up_the_later_ones() -> None:
    books, definition = make()
    first, second = admit(books, definition), admit(books, definition)
    assert first is not None
    assert second is not None

    books.ready(second)
    assert send_all(books) == []
    books.ready(first)
    assert send_all(books) == [1, 2]


def test_after_a_reconnect_what_is_unsettled_is_sent_again_in_order_and_before_the_rest() -> None:
    books, definition = make(pages=6)
    for _ in range(4):
        capture = admit(books, definition)
        assert capture is not None
        books.ready(capture)
    assert send_all(books) == [1, 2, 3, 4]
    books.acknowledged([(2, 2)])
    late = admit(books, definition)
    assert late is not None
    books.ready(late)

    books.reconnected()

    assert not books.all_sent(4)
    books.acknowledged([(3, 3)])  # the daemon finishes a joined job before it is sent again
    assert send_all(books) == [1, 4, 5]
    assert books.all_sent(5)


def test_answers_about_what_is_not_in_flight_change_nothing() -> None:
    books, definition = make()
    capture = admit(books, definition)
    assert capture is not None
    books.acknowledged([(1, 1), (5, 9), (0, 2**63 - 1)])  # 1 is not sent yet
    assert books.snapshot().committed == 0

    books.ready(capture)
    send_all(books)
    books.acknowledged([(0, 2**63 - 1)])
    books.acknowledged([(1, 1)])
    books.refused([NackRow(1, 0, "")])

    now = books.snapshot()
    assert (now.committed, now.in_flight, now.dropped) == (1, 0, {})


def test_too_large_for_the_arena_is_told_from_no_room_now() -> None:
    books, definition = make(pages=4)
    assert admit(books, definition, 5 * PAGE) is None
    assert admit(books, definition, 4 * PAGE) is not None
    assert admit(books, definition, PAGE) is None
    assert books.snapshot().dropped == {"too_large": 1, "arena_full": 1}


def test_block_waits_for_room_and_takes_it() -> None:
    books, definition = make(pages=1, max_block_s=30)
    first = admit(books, definition)
    assert first is not None
    books.ready(first)
    send_all(books)
    taken: list[Capture | None] = []
    thread = threading.Thread(target=lambda: taken.append(admit(books, definition)))
    thread.start()
    wait_until(lambda: books.waiting.count)
    assert not taken
    assert exact(books)

    books.acknowledged([(1, 1)])

    thread.join(10)
    assert taken[0] is not None
    assert exact(books)


def test_block_gives_up_after_its_time_and_does_not_wait_again_until_something_is_freed() -> None:
    books, definition = make(pages=1, max_block_s=0.2)
    first = admit(books, definition)
    assert first is not None

    started = time.monotonic()
    assert admit(books, definition) is None
    assert time.monotonic() - started >= 0.2
    waits: list[None] = []
    books.waiting.on_begin = lambda: waits.append(None)
    for _ in range(100):
        assert admit(books, definition) is None
    assert not waits
    assert books.snapshot().dropped == {"arena_full": 101}

    books.ready(first)
    send_all(books)
    books.acknowledged([(1, 1)])
    assert admit(books, definition) is not None
    started = time.monotonic()
    assert admit(books, definition) is None
    assert time.monotonic() - started >= 0.2, "waits again once the daemon has freed something"


def test_a_wait_that_ran_out_while_others_were_given_room_is_no_standstill() -> None:
    books, definition = make(pages=2, max_block_s=1.0)
    for _ in range(2):
        small = admit(books, definition)
        assert small is not None
        books.ready(small)
    send_all(books)

    def free_one() -> None:
        wait_until(lambda: books.waiting.count)
        books.acknowledged([(1, 1)])

    freeing = threading.Thread(target=free_one)
    freeing.start()
    assert admit(books, definition, 2 * PAGE) is None
    freeing.join()
    started = time.monotonic()
    assert admit(books, definition, 2 * PAGE) is None
    assert time.monotonic() - started >= 1.0


def test_closing_wakes_a_blocked_capture_and_counts_everything() -> None:
    books, definition = make(pages=1, max_block_s=60)
    admit(books, definition)
    thread = threading.Thread(target=admit, args=(books, definition))
    thread.start()
    wait_until(lambda: books.waiting.count)

    assert books.close(DropReason.REJECTED) == 1

    thread.join(10)
    assert not thread.is_alive()
    assert admit(books, definition) is None
    now = books.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (3, 0, {"rejected": 3})


def test_counts_are_exact_with_many_threads() -> None:
    books, definition = make(pages=8)
    stop = threading.Event()

    def settle() -> None:
        while not stop.is_set() or books.busy:
            batch = books.next_batch(64)
            books.acknowledged([(c.descriptor.sequence, c.descriptor.sequence) for c in batch])

    def offer() -> None:
        for _ in range(2000):
            capture = admit(books, definition)
            if capture is not None:
                books.ready(capture)

    settler = threading.Thread(target=settle)
    settler.start()
    threads = [threading.Thread(target=offer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    settler.join()

    now = books.snapshot()
    assert now.offered == 8000
    assert now.in_flight == 0
    assert exact(books)
    assert admit(books, definition, 8 * PAGE) is not None, "the arena is whole again"


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_ledger_rows_are_told_once_per_change_and_all_again_after_a_reconnect(limit: int) -> None:
    books, definition = make()
    for reason in (DropReason.UNSUPPORTED, DropReason.INTERNAL, DropReason.UNSUPPORTED):
        books.refuse(definition, reason, 10, 3)

    told = []
    while books.ledger.changed:
        told += books.ledger.take(limit)
    assert sorted((row.reason, row.count) for row in told) == sorted(
        [(REASON_INDEX[DropReason.UNSUPPORTED], 2), (REASON_INDEX[DropReason.INTERNAL], 1)]
    )
    assert books.ledger.take(limit) == []
    books.reconnected()
    assert len(books.ledger.take(1000)) == 2


def test_one_iteration_takes_no_more_than_its_budget_and_the_next_begins_anew() -> None:
    books, definition = make(pages=16, step_nbytes=3 * PAGE)

    taken = [
        admit(books, definition, nbytes, iteration) is not None
        for iteration, nbytes in [
            (0, 2 * PAGE),
            (0, 2 * PAGE),
            (0, PAGE),
            (1, 3 * PAGE),
            (0, 4),
            (1, 4),
            (0, 0),
        ]
    ]

    assert taken == [True, False, True, True, False, False, True]
    assert books.snapshot().dropped == {"step_budget": 3}
    rows = [(row.count, row.nbytes, row.first_iteration, row.last_iteration) for row in books.ledger.take(9)]
    assert rows == [(3, 2 * PAGE + 8, 0, 1)]
    assert exact(books)


def test_what_found_no_room_in_the_arena_leaves_the_budget_to_others() -> None:
    books, definition = make(pages=2, step_nbytes=3 * PAGE)

    assert admit(books, definition, 2 * PAGE) is not None
    assert admit(books, definition, PAGE) is None  # the arena is full
    books.close(DropReason.NOT_CONNECTED)

    assert books.snapshot().dropped == {"arena_full": 1, "not_connected": 1}
    assert books.step_budget.has_room(0, PAGE)
    assert not books.step_budget.has_room(0, PAGE + 1)


def test_what_is_given_up_before_it_is_sent_leaves_the_budget_to_others() -> None:
    books, definition = make(pages=8, step_nbytes=3 * PAGE)
    for give_up in (books.abort, books.abandon):
        capture = admit(books, definition, 3 * PAGE)
        assert capture is not None
        assert not books.step_budget.has_room(0, 1)
        give_up(capture, DropReason.INTERNAL)
        assert books.step_budget.has_room(0, 3 * PAGE)

    capture = admit(books, definition, 3 * PAGE)
    assert capture is not None
    books.ready(capture)
    send_all(books)
    books.refused([NackRow(3, REASON_INDEX[DropReason.DISK_FULL], "full")])
    assert not books.step_budget.has_room(0, 1)  # it was sent


def test_a_budget_is_kept_for_several_iterations_at_once_and_forgets_old_ones() -> None:
    budget = StepBudget(10)
    for iteration in range(20):
        budget.take(iteration, 10)

    assert [iteration for iteration in range(20) if not budget.has_room(iteration, 1)] == list(range(12, 20))
    assert budget.has_room(19, 0)


def test_those_that_wait_for_room_take_no_more_than_the_budget_together() -> None:
    books, definition = make(pages=2, max_block_s=30, step_nbytes=3 * PAGE)
    first = admit(books, definition, 2 * PAGE)
    assert first is not None
    taken: list[Capture | None] = []
    threads = [
        threading.Thread(target=lambda: taken.append(admit(books, definition, PAGE))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: books.waiting.count == 2)

    books.ready(first)
    send_all(books)
    books.acknowledged([(1, 1)])

    for thread in threads:
        thread.join(10)
    assert sum(capture is not None for capture in taken) == 1
    assert books.snapshot().dropped == {"step_budget": 1}
    assert exact(books)
    assert books.slots.free_nbytes == PAGE


def test_a_drop_counts_the_bytes_of_the_tensor_and_not_the_room_for_its_statistics() -> None:
    books, definition = make(pages=1)
    admit(books, definition)
    for reason in (None, DropReason.STOPPED):
        if reason is not None:
            books.take_offers(False)
        descriptor = Descriptor(0, 0, PAGE - 80, definition.id, ((PAGE - 80) // 4,), Moment(0))
        assert books.admit(definition, descriptor, 80) is None

    for reason in (DropReason.ARENA_FULL, DropReason.STOPPED):
        row = books.ledger.row(definition.id, reason)
        assert row is not None
        assert (row.count, row.nbytes) == (1, PAGE - 80)


def test_what_is_being_copied_at_a_refusal_is_known_when_the_session_closes_later() -> None:
    books, definition = make()
    admit(books, definition)

    books.close(DropReason.REJECTED)
    books.close(DropReason.NOT_CONNECTED)

    assert books.copying, "its thread may write to the slot still, which must not be unmapped"
