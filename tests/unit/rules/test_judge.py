"""The judge: when a rule fires, what it lists, what keeps it quiet, and that its memory is bounded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from capd.analyze.error_sums import Errors, ErrorSums
from capd.rules import judge as judging
from capd.rules import watching_rule
from capd.rules.firing import Firing
from capd.rules.judge import HOLD_S, Judge
from capd.rules.schema import parse_triggers
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.geometry import Geometry
from capd.store.format.statistics import summarise
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.scalars import scalar_key

DAY_NS = 86_400 * 10**9
GEOMETRY = Geometry((4,), (4,), 4, 4, 8)


class Bench:
    """A judge with a clock."""

    def __init__(self, *tables: dict[str, Any]) -> None:
        self.judge = Judge(parse_triggers([{"name": "mine", **table} for table in tables]))
        self.now_s, self.time_ns = 0.0, 10**18

    def record(
        self,
        iteration: int,
        *values: float,
        name: str = "input",
        rank: int = 0,
        run: str = "run",
        **more: Any,
    ) -> None:
        key = more.pop("key", None) or Key(
            quant_type="bf16",
            rank=rank,
            tensor_name=name,
            layer=more.pop("layer", 0),
            module=more.pop("module", "m"),
        )
        stats = summarise(np.array(values, "f8"), "float64")
        header = SeriesHeader(more.pop("path", f"rank{rank}/{name}"), key, "float64", "none", GEOMETRY)
        row = RecordRow(b"c" * 16, 0, (len(values),), 8, Moment(iteration=iteration, **more), stats=stats)
        self.judge.record(run, header, row, self.now_s, self.time_ns)

    def scalar(self, iteration: int, value: float, rank: int = 0) -> None:
        self.record(iteration, value, key=scalar_key("loss", rank), path=f"scalar{rank}", rank=rank)

    def errors(
        self, iteration: int, sqnr_db: int, name: str = "input", fmt: str = "mxfp8", **more: Any
    ) -> None:
        """Measured errors of a record of a module, with this SQNR."""
        key = Key(quant_type="bf16", rank=0, tensor_name=name, layer=0, module="m")
        found = Errors(records=1, count=4, sums=ErrorSums(x2=10**sqnr_db, d2=10 ** (sqnr_db - sqnr_db // 10)))
        at = "run", f"rank0/{name}", key, Moment(iteration=iteration, **more)
        self.judge.errors(at, {fmt: found}, self.now_s, self.time_ns)

    def fired(self) -> list[Firing]:
        """Everything that fired until now."""
        return self.judge.ready(self.now_s, all_of_them=True)

    def at(self) -> list[int]:
        return [one.iteration for one in self.fired()]


NAN = {"metric": "nan", "above": 0, "cooldown": 0}


def test_a_firing_lists_all_series_of_its_iteration_and_waits_for_them() -> None:
    bench = Bench(NAN)
    for number in range(30):
        bench.record(7, 1.0, math.nan, name=f"t{number}", micro_batch=number % 2)
        bench.record(7, 1.0, math.nan, name=f"t{number}")
    bench.record(7, 1.0)
    bench.record(7, math.nan, rank=1)
    assert bench.judge.ready(HOLD_S / 2) == []
    one, other = bench.judge.ready(HOLD_S)
    assert (one.iteration, one.rank, one.value, one.limit, one.micro_batch) == (7, 0, 1.0, 0.0, 0)
    assert list(one.paths) == [f"rank0/t{number}" for number in range(30)]
    assert (other.rank, list(other.paths)) == (1, ["rank1/input"])


def test_series_that_come_after_the_next_iteration_are_of_their_own_alert() -> None:
    bench = Bench(NAN)
    for iteration, name in ((1, "a"), (2, "a"), (1, "b"), (2, "b")):
        bench.record(iteration, math.nan, name=name)
    found = bench.fired()
    assert [(one.iteration, list(one.paths)) for one in found] == [
        (1, ["rank0/a", "rank0/b"]), (2, ["rank0/a", "rank0/b"]),
    ]  # fmt: skip
    # Both have their alert, whatever still comes.
    bench.record(1, math.nan, name="c")
    bench.record(2, math.nan, name="c")
    assert bench.at() == []


def test_a_cooldown_that_is_not_given_leaves_no_rank_silent_for_ever() -> None:
    """A rank that hangs begins no iteration: 100 of them would never be over."""
    bench = Bench({"metric": "silent", "above": 60}, {"name": "nan", "metric": "nan", "above": 0})
    for iteration, silent in ((10, 61.0), (11, 0.0), (50, 61.0), (50, 99.0)):
        bench.judge.rank(("run", 0, 0, iteration), "silent", silent, 0.0, bench.time_ns)
        bench.record(iteration, math.nan)
    assert sorted((one.rule.name, one.iteration) for one in bench.fired()) == [
        ("mine", 10), ("mine", 50), ("nan", 10),
    ]  # fmt: skip


def test_an_iteration_is_unclean_for_its_attempt_alone() -> None:
    baseline = {"iterations": 5, "min": 2, "min_delta": 0}
    bench = Bench({"metric": "absmax", "factor_above": 2, "baseline": baseline, "cooldown": 0})
    for attempt in (0, 1):
        for iteration, value in enumerate((1.0, 1.0, 1.0, 9.0 if attempt == 0 else 1.0, 1.0)):
            bench.record(iteration, value, attempt=attempt)
    state = bench.judge._rules[0].series["run", "rank0/input"].baseline
    assert state is not None
    assert len(state) == 4


def test_the_cooldown_counts_iterations_and_a_restarted_job_fires_again() -> None:
    bench = Bench({**NAN, "cooldown": 10})
    for iteration in range(25):
        bench.record(iteration, math.nan)
    assert bench.at() == [0, 10, 20]
    assert bench.judge.suppressed == 22
    # A record that comes late is of the alert before.
    bench.record(18, math.nan)
    assert bench.at() == []
    bench.record(20, math.nan, attempt=1)
    assert bench.at() == [20]
    # A job may go back by itself.
    bench.record(3, math.nan, attempt=1)
    assert bench.at() == [3]


def test_an_iteration_fires_once_also_without_a_cooldown() -> None:
    bench = Bench(NAN)
    bench.record(4, math.nan)
    assert bench.at() == [4]
    bench.record(4, math.nan, name="late")
    assert bench.at() == []


def test_the_limit_of_a_day_holds_for_all_ranks_of_a_run_and_ends_with_the_day() -> None:
    bench = Bench({**NAN, "max_per_day": 3})
    for iteration in range(5):
        bench.record(iteration, math.nan, rank=iteration % 2)
    bench.record(0, math.nan, run="other")
    found = bench.fired()
    assert [(one.run_id, one.iteration, one.is_last) for one in found if one.run_id == "run"] == [
        ("run", 0, False), ("run", 1, False), ("run", 2, True),
    ]  # fmt: skip
    assert [one.iteration for one in found if one.run_id == "other"] == [0]
    bench.time_ns += DAY_NS + 1
    bench.record(9, math.nan)
    assert bench.at() == [9]


def test_records_in_a_row_are_those_of_one_series() -> None:
    bench = Bench({"metric": "absmax", "above": 10, "for": 3, "cooldown": 0})
    for iteration, value in enumerate([11, 11, 1, 11, 11, 11, 11]):
        bench.record(iteration, value)
        bench.record(iteration, 11 if iteration % 2 else 1, name="other")
    assert bench.at() == [5, 6]


def test_a_jump_is_over_the_last_record_of_the_series() -> None:
    bench = Bench({"metric": "jump", "above": 16, "cooldown": 0})
    for iteration, value in enumerate([0.0, 1.0, 16.0, 257.0, math.nan, 4200.0]):
        bench.record(iteration, value)
    found = bench.fired()
    assert [(one.iteration, one.value) for one in found] == [(3, 257 / 16), (5, 4200 / 257)]


def test_a_band_fires_on_both_sides() -> None:
    bench = Bench({"metric": "mean", "above": 1, "below": -1, "cooldown": 0})
    for iteration, value in enumerate([0.0, 1.0, 1.5, -1.0, -1.5]):
        bench.record(iteration, value)
    assert [(one.iteration, one.limit) for one in bench.fired()] == [(2, 1.0), (4, -1.0)]


SPIKE = {
    "metric": "scalar:loss", "factor_above": 1.3, "cooldown": 0,
    "baseline": {"iterations": 10, "min": 5, "min_delta": 0.2},
}  # fmt: skip


def test_a_spike_is_compared_with_the_median_of_clean_iterations() -> None:
    bench = Bench(SPIKE)
    for iteration in range(5):
        # Nothing is known yet.
        bench.scalar(iteration, 100.0 if iteration == 2 else 1.0)
    bench.scalar(5, 1.19)
    # 1.3 times the median, and not 0.2 above it.
    bench.scalar(6, 1.31)
    bench.scalar(7, 50.0)
    bench.scalar(8, 50.0)
    bench.scalar(9, 1.0)
    found = bench.fired()
    assert [(one.iteration, one.value) for one in found] == [(6, 1.31), (7, 50.0), (8, 50.0)]
    assert all(one.limit == pytest.approx(1.3) for one in found)


def test_a_slow_rise_is_no_spike() -> None:
    bench = Bench(SPIKE)
    for iteration in range(300):
        bench.scalar(iteration, 1.01**iteration)
    assert bench.at() == []


def test_a_scalar_that_is_no_finite_number_fires_at_once_and_leaves_the_baseline_alone() -> None:
    bench = Bench(SPIKE, {"name": "low", "metric": "scalar:loss", "below": -5})
    bench.scalar(0, math.nan)
    assert sorted((one.rule.name, one.iteration) for one in bench.fired()) == [("low", 0), ("mine", 0)]
    for iteration in range(1, 8):
        bench.scalar(iteration, 1.0)
    bench.scalar(8, math.inf)
    bench.scalar(9, 1.4)
    assert [one.iteration for one in bench.fired() if one.rule.name == "mine"] == [8, 9]


def test_a_negative_loss_has_a_baseline_too() -> None:
    bench = Bench(SPIKE)
    for iteration in range(10):
        bench.scalar(iteration, -2.0)
    bench.scalar(10, -1.5)
    bench.scalar(11, -1.3)
    [found] = bench.fired()
    assert (found.iteration, found.limit) == (11, pytest.approx(-1.4))


def test_another_attempt_begins_with_an_empty_baseline() -> None:
    bench = Bench(SPIKE)
    for iteration in range(10):
        bench.scalar(iteration, 1.0)
    for iteration in range(4):
        bench.record(iteration, 9.0, key=scalar_key("loss", 0), path="scalar0", attempt=1)
    assert bench.at() == []


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, ["a", "b", "loss"]),
        ({"tensors": "input"}, ["a"]),
        ({"layers": "1-"}, ["b"]),
        ({"include": "mlp"}, ["b"]),
        ({"exclude": "mlp"}, ["a"]),
        ({"phases": "post"}, []),
        ({"series": "*b"}, ["b"]),
        ({"ranks": "1"}, []),
        ({"steps": "0-2"}, []),
        ({"micro_batches": "0"}, ["a", "b", "loss"]),
    ],
)
def test_a_rule_looks_at_what_its_selectors_name(selector: dict[str, Any], expected: list[str]) -> None:
    bench = Bench({**NAN, **selector})
    bench.record(3, math.nan, path="a")
    bench.record(3, math.nan, path="b", name="weight", layer=1, module="mlp.up")
    bench.record(3, math.nan, path="loss", key=scalar_key("loss", 0))
    assert [path for one in bench.fired() for path in one.paths] == expected


def test_metrics_of_tensors_leave_scalars_alone() -> None:
    bench = Bench({"metric": "absmax", "above": 1})
    bench.scalar(0, 100.0)
    assert bench.at() == []


def test_a_rank_fires_when_its_condition_becomes_true() -> None:
    bench = Bench({"metric": "silent", "above": 30, "cooldown": 0, "ranks": "0"})
    for second in range(100):
        for rank in (0, 1):
            bench.judge.rank(("run", rank, 0, 5), "silent", float(second), bench.now_s, bench.time_ns)
    bench.judge.rank(("run", 0, 0, 6), "silent", 0.0, bench.now_s, bench.time_ns)
    bench.judge.rank(("run", 0, 0, 6), "silent", 31.0, bench.now_s, bench.time_ns)
    assert [(one.rank, one.iteration, one.value, one.paths) for one in bench.fired()] == [
        (0, 5, 31.0, {}), (0, 6, 31.0, {}),
    ]  # fmt: skip


def test_cooldowns_and_days_continue_from_earlier_alerts() -> None:
    bench = Bench({**NAN, "cooldown": 10, "max_per_day": 2}, {**NAN, "name": "other"})
    old = bench.time_ns - DAY_NS - 1
    bench.judge.restore(
        "run", [("mine", 0, 0, 5, old), ("mine", 0, 0, 90, bench.time_ns - 1), ("gone", 0, 0, 1, 1)]
    )
    for iteration in (92, 100, 110):
        bench.record(iteration, math.nan)
    found = [(one.rule.name, one.iteration) for one in bench.fired()]
    assert [iteration for name, iteration in found if name == "mine"] == [100]
    assert [iteration for name, iteration in found if name == "other"] == [92, 100, 110]


def test_a_run_that_was_removed_is_forgotten() -> None:
    bench = Bench({**NAN, "cooldown": 1000, "max_per_day": 1})
    bench.record(5, math.nan)
    assert bench.at() == [5]
    bench.judge.forget("run")
    bench.record(5, math.nan)
    assert bench.at() == [5]


def test_the_memory_of_series_is_bounded_and_what_was_forgotten_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching_rule, "_MOST_STATES", 10)
    monkeypatch.setattr(judging, "_MOST_SERIES", 10)
    bench = Bench({"metric": "jump", "above": 2, "cooldown": 0})
    for iteration in range(2):
        for number in range(11):
            bench.record(iteration, 10.0**iteration, name=f"t{number}")
    # Each series had to go before its second record.
    assert bench.at() == []
    assert bench.judge.forgotten == 12
    for iteration in range(2, 4):
        bench.record(iteration, 10.0**iteration)
    assert bench.at() == [3]


def test_a_record_without_statistics_says_nothing() -> None:
    bench = Bench(NAN)
    key = Key(quant_type="bf16", rank=0, tensor_name="input")
    header = SeriesHeader("p", key, "float64", "none", GEOMETRY)
    bench.judge.record("run", header, RecordRow(b"", 0, (), 8, Moment()), 0.0, 0)
    assert bench.at() == []


LOW = {"metric": "sqnr:mxfp8", "below": 20, "cooldown": 0}


def test_errors_of_a_format_fire_with_the_moment_and_series_of_their_record() -> None:
    bench = Bench({**LOW, "tensors": "input", "steps": "0-8"}, {"name": "nan", **NAN})
    bench.record(7, 1.0)
    bench.errors(7, 30)
    bench.errors(7, 10, fmt="mxfp8:e5m2")
    bench.errors(7, 10, name="weight")
    bench.errors(9, 10)
    assert bench.fired() == []
    bench.errors(7, 10, micro_batch=2)
    [one] = bench.fired()
    assert (one.iteration, one.micro_batch, one.rank, list(one.paths)) == (7, 2, 0, ["rank0/input"])
    assert (one.value, one.limit) == (10.0, 20.0)


def test_records_and_errors_of_one_series_do_not_break_each_others_row() -> None:
    bench = Bench({**LOW, "for": 2}, {"name": "nan", **NAN, "for": 2})
    for iteration in (1, 2):
        bench.record(iteration, math.nan)
        bench.errors(iteration, 10)
    assert sorted((one.rule.name, one.iteration) for one in bench.fired()) == [("mine", 2), ("nan", 2)]
    bench.errors(3, 30)
    bench.errors(4, 10)
    assert bench.fired() == []
