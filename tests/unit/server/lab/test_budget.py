"""The lab's share of a CPU, under a clock of the test."""

from __future__ import annotations

from collections import Counter

import pytest

from capd.server.lab.budget import CpuBudget, FairShare, MeasuringCost


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("share", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("cost_s", [0.004, 0.3, 3.0])
def test_over_a_minute_of_full_load_the_share_is_held_within_a_fifth(share: float, cost_s: float) -> None:
    clock = Clock()
    budget = CpuBudget(share, clock)
    spent = 0.0
    while clock.now < 1060.0:
        if (wait_s := budget.wait_s()) > 0:
            clock.now += wait_s
            continue
        clock.now += cost_s
        budget.spend(cost_s)
        spent += cost_s
    # The last record may begin just before the end.
    assert share * 60 * 0.8 <= spent <= share * 60 * 1.2 + cost_s


def test_a_quiet_hour_allows_no_more_than_two_seconds_of_share_at_once() -> None:
    clock = Clock()
    budget = CpuBudget(0.5, clock)
    clock.now += 3600.0
    assert budget.wait_s() == 0.0
    budget.spend(1.25)
    assert budget.wait_s() == pytest.approx(0.5)


@pytest.mark.parametrize("cost_s", [0.004, 0.3])
def test_whoever_waits_until_time_would_be_lost_still_has_the_whole_share(cost_s: float) -> None:
    clock = Clock()
    budget = CpuBudget(0.2, clock)
    spent, longest_s = 0.0, 0.0
    while clock.now < 1060.0:
        if (wait_s := budget.wait_full_s()) > 0:
            longest_s = max(longest_s, wait_s)
            clock.now += wait_s
            continue
        clock.now += cost_s
        budget.spend(cost_s)
        spent += cost_s
    assert 0.2 * 60 * 0.8 <= spent <= 0.2 * 60 * 1.2 + cost_s
    # One record at a time, and no burst.
    assert longest_s == pytest.approx(cost_s / 0.2 - cost_s)


def test_what_is_wanted_within_the_budget_is_all_admitted() -> None:
    clock = Clock()
    fair = FairShare(0.2, clock)
    for step in range(500):
        clock.now += 0.1
        assert fair.admits(("layer", step), 0.015)


def test_beyond_the_budget_every_layer_gets_its_turn_and_tensors_of_a_call_stay_together() -> None:
    """Sixty layers in each step want five times the budget: all layers are measured alike, the last ones, too."""
    clock = Clock()
    fair = FairShare(0.2, clock)
    measured: Counter[int] = Counter()
    spent = 0.0
    for step in range(600):
        clock.now += 0.5
        for layer in range(60):
            call = (b"client", f"layers.{layer}", layer, step, 0, 0)
            answers = [fair.admits(call, 0.5 / 180) for _ in ("input", "weight", "grad_output")]
            if step >= 100:
                measured[layer] += answers[0]
                spent += 0.5 / 180 * sum(answers)
                # The share may change in between by a hair, and that is the only way apart.
                assert answers[0] == answers[1] == answers[2] or sum(answers) in (1, 2)
    assert spent / 250 == pytest.approx(0.2, rel=0.1)
    assert len(measured) == 60
    assert min(measured.values()) > 0.6 * max(measured.values())


def test_the_cost_of_a_record_is_learned() -> None:
    cost = MeasuringCost(2)
    first = cost.of(8 << 20)
    for _ in range(200):
        cost.learn(8 << 20, 0.5)
    assert cost.of(8 << 20) == pytest.approx(0.5, rel=0.01)
    assert first < 0.2
