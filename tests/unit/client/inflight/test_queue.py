"""The in-flight queue: exact at every moment, in order, and waiting only under policy block and only so long."""

from __future__ import annotations

import threading
import time

import pytest

from capd_client.inflight.capture import Capture, Refused
from capd_client.inflight.counters import REASON_INDEX
from capd_client.inflight.step_budget import StepBudget
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor, NackRow
from tests.kit.client.peer import wait_until
from tests.kit.client.queues import PAGE, admit, exact, make, send_all


def test_every_end_of_a_capture_keeps_the_sum() -> None:
    queue, definition = make(pages=4)
    captures = [admit(queue, definition, iteration=i) for i in range(6)]
    assert [capture is not None for capture in captures] == [True] * 4 + [False] * 2
    assert exact(queue)
    for capture in captures[:3]:
        assert capture is not None
        queue.ready(capture)
    assert captures[3] is not None
    queue.abort(captures[3], DropReason.RING_FULL)

    assert send_all(queue) == [1, 2, 3]
    queue.acknowledged([(1, 1)])
    queue.refused([NackRow(2, REASON_INDEX[DropReason.DISK_FULL], "full")])

    now = queue.snapshot()
    assert (now.offered, now.committed, now.in_flight) == (6, 1, 1)
    assert now.dropped == {"arena_full": 2, "ring_full": 1, "disk_full": 1}
    assert exact(queue)
    row = queue.ledger.row(definition.id, DropReason.ARENA_FULL)
    assert row is not None
    assert (row.count, row.nbytes, row.first_iteration, row.last_iteration) == (2, 2 * PAGE, 4, 5)


def test_a_capture_still_being_copied_holds_up_the_later_ones() -> None:
    queue, definition = make()
    first, second = admit(queue, definition), admit(queue, definition)
    assert first is not None
    assert second is not None

    queue.ready(second)
    assert send_all(queue) == []
    queue.ready(first)
    assert send_all(queue) == [1, 2]


def test_after_a_reconnect_what_is_unsettled_is_sent_again_in_order_and_before_the_rest() -> None:
    queue, definition = make(pages=6)
    for _ in range(4):
        capture = admit(queue, definition)
        assert capture is not None
        queue.ready(capture)
    assert send_all(queue) == [1, 2, 3, 4]
    queue.acknowledged([(2, 2)])
    late = admit(queue, definition)
    assert late is not None
    queue.ready(late)

    queue.reconnected()

    assert not queue.all_sent(4)
    queue.acknowledged([(3, 3)])  # the daemon finishes a joined job before it is sent again
    assert send_all(queue) == [1, 4, 5]
    assert queue.all_sent(5)


def test_answers_about_what_is_not_in_flight_change_nothing() -> None:
    queue, definition = make()
    capture = admit(queue, definition)
    assert capture is not None
    queue.acknowledged([(1, 1), (5, 9), (0, 2**63 - 1)])  # 1 is not sent yet
    assert queue.snapshot().committed == 0

    queue.ready(capture)
    send_all(queue)
    queue.acknowledged([(0, 2**63 - 1)])
    queue.acknowledged([(1, 1)])
    queue.refused([NackRow(1, 0, "")])

    now = queue.snapshot()
    assert (now.committed, now.in_flight, now.dropped) == (1, 0, {})


def test_too_large_for_the_arena_is_told_from_no_room_now() -> None:
    queue, definition = make(pages=4)
    assert admit(queue, definition, 5 * PAGE) is None
    assert admit(queue, definition, 4 * PAGE) is not None
    assert admit(queue, definition, PAGE) is None
    assert queue.snapshot().dropped == {"too_large": 1, "arena_full": 1}


def test_block_waits_for_room_and_takes_it() -> None:
    queue, definition = make(pages=1, max_block_s=30)
    first = admit(queue, definition)
    assert first is not None
    queue.ready(first)
    send_all(queue)
    taken: list[Capture | None] = []
    thread = threading.Thread(target=lambda: taken.append(admit(queue, definition)))
    thread.start()
    wait_until(lambda: queue.waiting.count)
    assert not taken
    assert exact(queue)

    queue.acknowledged([(1, 1)])

    thread.join(10)
    assert taken[0] is not None
    assert exact(queue)


def test_block_gives_up_after_its_time_and_does_not_wait_again_until_something_is_freed() -> None:
    waits: list[None] = []
    queue, definition = make(pages=1, max_block_s=0.2, wake=lambda: waits.append(None))
    first = admit(queue, definition)
    assert first is not None

    started = time.monotonic()
    assert admit(queue, definition) is None
    assert time.monotonic() - started >= 0.2
    waits.clear()
    for _ in range(100):
        assert admit(queue, definition) is None
    assert not waits
    assert queue.snapshot().dropped == {"arena_full": 101}

    queue.ready(first)
    send_all(queue)
    queue.acknowledged([(1, 1)])
    assert admit(queue, definition) is not None
    started = time.monotonic()
    assert admit(queue, definition) is None
    assert time.monotonic() - started >= 0.2, "waits again once the daemon has freed something"


def test_a_wait_that_ran_out_while_others_were_given_room_is_no_standstill() -> None:
    queue, definition = make(pages=2, max_block_s=1.0)
    for _ in range(2):
        small = admit(queue, definition)
        assert small is not None
        queue.ready(small)
    send_all(queue)

    def free_one() -> None:
        wait_until(lambda: queue.waiting.count)
        queue.acknowledged([(1, 1)])

    freeing = threading.Thread(target=free_one)
    freeing.start()
    assert admit(queue, definition, 2 * PAGE) is None
    freeing.join()
    started = time.monotonic()
    assert admit(queue, definition, 2 * PAGE) is None
    assert time.monotonic() - started >= 1.0


def test_closing_wakes_a_blocked_capture_and_counts_everything() -> None:
    queue, definition = make(pages=1, max_block_s=60)
    admit(queue, definition)
    thread = threading.Thread(target=admit, args=(queue, definition))
    thread.start()
    wait_until(lambda: queue.waiting.count)

    assert queue.close(DropReason.REJECTED) == 1

    thread.join(10)
    assert not thread.is_alive()
    assert admit(queue, definition) is None
    now = queue.snapshot()
    assert (now.offered, now.in_flight, now.dropped) == (3, 0, {"rejected": 3})


def test_counts_are_exact_with_many_threads() -> None:
    queue, definition = make(pages=8)
    stop = threading.Event()

    def settle() -> None:
        while not stop.is_set() or queue.busy:
            batch = queue.next_batch(64)
            queue.acknowledged([(c.descriptor.sequence, c.descriptor.sequence) for c in batch])

    def offer() -> None:
        for _ in range(2000):
            capture = admit(queue, definition)
            if capture is not None:
                queue.ready(capture)

    settler = threading.Thread(target=settle)
    settler.start()
    threads = [threading.Thread(target=offer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    settler.join()

    now = queue.snapshot()
    assert now.offered == 8000
    assert now.in_flight == 0
    assert exact(queue)
    assert admit(queue, definition, 8 * PAGE) is not None, "the arena is whole again"


@pytest.mark.parametrize("limit", [1, 2, 1000])
def test_ledger_rows_are_told_once_per_change_and_all_again_after_a_reconnect(limit: int) -> None:
    queue, definition = make()
    for reason in (DropReason.UNSUPPORTED, DropReason.INTERNAL, DropReason.UNSUPPORTED):
        queue.refuse(Refused(reason, definition, 10, 3))

    told = []
    while queue.ledger.changed:
        told += queue.ledger.take(limit)
    assert sorted((row.reason, row.count) for row in told) == sorted(
        [(REASON_INDEX[DropReason.UNSUPPORTED], 2), (REASON_INDEX[DropReason.INTERNAL], 1)]
    )
    assert queue.ledger.take(limit) == []
    queue.reconnected()
    assert len(queue.ledger.take(1000)) == 2


def test_one_iteration_takes_no_more_than_its_budget_and_the_next_begins_anew() -> None:
    queue, definition = make(pages=16, step_nbytes=3 * PAGE)

    taken = [
        admit(queue, definition, nbytes, iteration) is not None
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
    assert queue.snapshot().dropped == {"step_budget": 3}
    rows = [(row.count, row.nbytes, row.first_iteration, row.last_iteration) for row in queue.ledger.take(9)]
    assert rows == [(3, 2 * PAGE + 8, 0, 1)]
    assert exact(queue)


def test_what_found_no_room_in_the_arena_leaves_the_budget_to_others() -> None:
    queue, definition = make(pages=2, step_nbytes=3 * PAGE)

    assert admit(queue, definition, 2 * PAGE) is not None
    assert admit(queue, definition, PAGE) is None  # the arena is full
    queue.close(DropReason.NOT_CONNECTED)

    assert queue.snapshot().dropped == {"arena_full": 1, "not_connected": 1}
    assert queue.step_budget.has_room(0, PAGE)
    assert not queue.step_budget.has_room(0, PAGE + 1)


def test_what_is_given_up_before_it_is_sent_leaves_the_budget_to_others() -> None:
    queue, definition = make(pages=8, step_nbytes=3 * PAGE)
    for give_up in (queue.abort, queue.abandon):
        capture = admit(queue, definition, 3 * PAGE)
        assert capture is not None
        assert not queue.step_budget.has_room(0, 1)
        give_up(capture, DropReason.INTERNAL)
        assert queue.step_budget.has_room(0, 3 * PAGE)

    capture = admit(queue, definition, 3 * PAGE)
    assert capture is not None
    queue.ready(capture)
    send_all(queue)
    queue.refused([NackRow(3, REASON_INDEX[DropReason.DISK_FULL], "full")])
    assert not queue.step_budget.has_room(0, 1)  # it was sent


def test_a_budget_is_kept_for_several_iterations_at_once_and_forgets_old_ones() -> None:
    budget = StepBudget(10)
    for iteration in range(20):
        budget.take(iteration, 10)

    assert [iteration for iteration in range(20) if not budget.has_room(iteration, 1)] == list(range(12, 20))
    assert budget.has_room(19, 0)


def test_those_that_wait_for_room_take_no_more_than_the_budget_together() -> None:
    queue, definition = make(pages=2, max_block_s=30, step_nbytes=3 * PAGE)
    first = admit(queue, definition, 2 * PAGE)
    assert first is not None
    taken: list[Capture | None] = []
    threads = [
        threading.Thread(target=lambda: taken.append(admit(queue, definition, PAGE))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: queue.waiting.count == 2)

    queue.ready(first)
    send_all(queue)
    queue.acknowledged([(1, 1)])

    for thread in threads:
        thread.join(10)
    assert sum(capture is not None for capture in taken) == 1
    assert queue.snapshot().dropped == {"step_budget": 1}
    assert exact(queue)
    assert queue.slots.free_nbytes == PAGE


def test_a_drop_counts_the_bytes_of_the_tensor_and_not_the_room_for_its_statistics() -> None:
    queue, definition = make(pages=1)
    admit(queue, definition)
    for reason in (None, DropReason.STOPPED):
        if reason is not None:
            queue.take_offers(False)
        descriptor = Descriptor(0, 0, PAGE - 80, definition.id, ((PAGE - 80) // 4,), Moment(0))
        refused = queue.admit(definition, descriptor, 80)
        assert isinstance(refused, Refused)
        assert refused.reason is (reason or DropReason.ARENA_FULL)

    for reason in (DropReason.ARENA_FULL, DropReason.STOPPED):
        row = queue.ledger.row(definition.id, reason)
        assert row is not None
        assert (row.count, row.nbytes) == (1, PAGE - 80)


def test_what_is_being_copied_at_a_refusal_is_known_when_the_session_closes_later() -> None:
    queue, definition = make()
    admit(queue, definition)

    queue.close(DropReason.REJECTED)
    queue.close(DropReason.NOT_CONNECTED)

    assert queue.copying, "its thread may write to the slot still, which must not be unmapped"
