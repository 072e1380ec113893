"""From which iteration an order holds, and which state each rank is told."""

from __future__ import annotations

import time

import pytest

from capd.server.rank.pace import LEAD_S, MAX_AHEAD, Pace, leading
from capd.server.rank.steering import RunSteering
from capd_client.protocol.control import Steer, Steered


def seen(*looks: tuple[float, int]) -> Pace:
    pace = Pace()
    for now, begun in looks:
        pace.look(begun, now)
    return pace


def test_without_a_known_pace_it_is_the_next_iteration() -> None:
    assert Pace().next_iteration(0, 100.0) == 0
    assert seen((100.0, 5)).next_iteration(5, 200.0) == 5


def test_of_slow_steps_it_is_the_next_unless_that_one_is_about_to_begin() -> None:
    pace = seen((0.0, 1), (10.0, 2), (20.0, 3))

    assert pace.step_s() == 10.0
    assert pace.next_iteration(3, 21.0) == 3
    assert pace.next_iteration(3, 20.0 + 10 - LEAD_S / 2) == 4


def test_a_step_that_takes_longer_than_others_may_end_any_moment() -> None:
    pace = seen((0.0, 1), (10.0, 2), (20.0, 3))

    assert pace.next_iteration(3, 900.0) == 4


def test_of_fast_steps_it_is_one_that_none_begins_within_the_lead() -> None:
    pace = seen(*((n * 0.25, 1 + 25 * n) for n in range(6)))  # 10 ms a step
    last = 1 + 25 * 5

    found = pace.next_iteration(last, 1.25)

    assert found - last == pytest.approx(LEAD_S / 0.01, abs=1)


def test_a_jump_in_the_count_is_no_pace() -> None:
    pace = seen((0.0, 1), (1.0, 2), (2.0, 100_000), (3.0, 100_001))
    assert pace.step_s() == 1.0

    pace = seen((0.0, 50), (1.0, 51), (2.0, 0), (3.0, 7))
    assert pace.step_s() is None


def in_force(steer: Steer) -> Steered:
    return Steered(id=steer.id, in_force=steer, since=steer.from_iteration)


def order(steering: RunSteering, at: int) -> Steer:
    return steering.order(capturing=False, selection=None, from_iteration=at, begun=[])


def test_an_order_without_an_iteration_waits_for_the_leading_rank() -> None:
    steering = RunSteering()
    steer = steering.order(capturing=False, selection=None, from_iteration=None, begun=[7, 9])
    assert steer.from_iteration == 9
    assert steering.order(capturing=False, selection=None, from_iteration=None, begun=[]).from_iteration == 0


@pytest.mark.parametrize(
    ("begun", "leads"),
    [
        ([], 0),
        ([0, 0], 0),
        ([7], 7),
        ([7, 9], 9),
        ([0, 100_001], 100_001),  # the other one is still loading what it resumes from
        ([7, 7 + MAX_AHEAD], 7 + MAX_AHEAD),
        ([7, 2**60], 7),
        ([7, 8, 2**60, 2**62], 8),
        ([100_001, 3, 100_000], 100_001),
    ],
)
def test_a_rank_far_from_the_others_leads_nobody(begun: list[int], leads: int) -> None:
    assert leading(begun) == leads


def test_a_count_beyond_all_measure_pushes_no_order_and_hides_no_pace() -> None:
    steering = RunSteering()
    for step in range(3):
        steering.look([7 + step, 2**60 + step])

    steer = steering.order(capturing=False, selection=None, from_iteration=None, begun=[10, 2**60])
    assert steer.from_iteration < 10 + MAX_AHEAD + 1


def test_ids_grow_also_behind_one_that_a_rank_brought_from_an_earlier_daemon() -> None:
    before, after = RunSteering(), RunSteering()
    old = order(before, 3)
    after.learn(in_force(old))

    assert after.wanted == old
    assert order(after, 4).id > old.id


def test_a_newcomer_follows_at_once_what_the_others_follow_already() -> None:
    steering = RunSteering()
    assert steering.for_rank(None) is None
    steer = order(steering, 50)
    assert steering.for_rank(None) == steer

    steering.learn(Steered(id=steer.id, pending=steer))
    assert steering.for_rank(None) == steer
    steering.learn(in_force(steer))

    newcomer = steering.for_rank(None)
    assert newcomer is not None
    assert (newcomer.id, newcomer.from_iteration) == (steer.id, 0)
    assert steering.for_rank(in_force(steer)) is None


def test_an_older_state_or_one_from_the_future_is_not_taken_up() -> None:
    steering = RunSteering()
    first = order(steering, 1)
    second = order(steering, 2)
    steering.learn(in_force(first))
    assert steering.wanted == second
    assert steering.for_rank(in_force(first)) == second

    steering.learn(in_force(Steer(id=time.time_ns() + 10**12, from_iteration=0)))
    assert steering.wanted == second
