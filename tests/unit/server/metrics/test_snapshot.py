"""The page stays bounded however many runs a daemon has seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from capd.histogram import Histogram
from capd.server.metrics.snapshot import KEPT_S, MAX_RUNS_SHOWN, Collector, shown
from capd.server.runs.figures import RunFigures


def run(number: int, *, active: bool = False, quiet_since: float = 1000.0) -> RunFigures:
    return RunFigures(
        str(number), active, quiet_since, world_size=1, quant_types=(), raw_nbytes=0, stored_nbytes=0
    )


def names(runs: list[RunFigures], now: float = 1000.0) -> list[str]:
    return [one.run_id for one in shown(runs, now)]


def test_a_run_leaves_some_time_after_its_last_rank() -> None:
    runs = [run(0), run(1, active=True, quiet_since=0.0)]

    assert names(runs, 1000.0 + KEPT_S - 1) == ["0", "1"]
    assert names(runs, 1000.0 + KEPT_S) == ["1"]


def test_the_newest_runs_stay_and_an_active_one_before_all_quiet_ones() -> None:
    runs = [run(number, active=number == 3) for number in range(200)]

    assert names(runs) == ["3", *map(str, range(200 - MAX_RUNS_SHOWN + 1, 200))]


def test_an_old_run_that_ranks_have_continued_is_as_new_as_its_last_rank() -> None:
    runs = [
        run(number, quiet_since=1000.0 if number == 3 else 900.0 + number / 1000) for number in range(200)
    ]

    assert names(runs) == ["3", *map(str, range(200 - MAX_RUNS_SHOWN + 1, 200))]


def test_not_even_active_runs_pass_the_limit() -> None:
    runs = [run(number, active=True) for number in range(200)]

    assert names(runs) == [str(number) for number in range(200 - MAX_RUNS_SHOWN, 200)]


def test_stored_bytes_do_not_follow_a_chunk_that_becomes_smaller() -> None:
    held: dict[str, int] = {}
    registry: Any = SimpleNamespace(
        figures=lambda each_rank: [
            RunFigures(name, True, 0.0, world_size=1, quant_types=(), raw_nbytes=0, stored_nbytes=nbytes)
            for name, nbytes in held.items()
        ]
    )
    pipeline: Any = SimpleNamespace(
        oldest_since=None, durations=(Histogram(), Histogram(), Histogram()), staged_nbytes=0, staging_nbytes=0,
        encoders=[], failing=False,
    )  # fmt: skip
    budget: Any = SimpleNamespace(stored=lambda: 0, refuses=False)
    listener: Any = SimpleNamespace(connections=0, refused={})
    collector = Collector(registry, pipeline, budget, listener, each_rank=False, clock=lambda: 0.0)

    def stored(**now: int) -> dict[str, int]:
        held.clear()
        held.update(now)
        return {one.run_id: one.stored_nbytes for one in collector.take().runs}

    assert stored(one=100, two=5) == {"one": 100, "two": 5}
    assert stored(one=90, two=6) == {"one": 100, "two": 6}
    assert stored(one=110) == {"one": 110}
    # A run that was removed and has begun again.
    assert stored(two=1) == {"two": 1}
