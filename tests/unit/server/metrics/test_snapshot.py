"""The page stays bounded however many runs a daemon has seen."""

from __future__ import annotations

from capd.server.metrics.snapshot import KEPT_S, MAX_RUNS_SHOWN, shown
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
