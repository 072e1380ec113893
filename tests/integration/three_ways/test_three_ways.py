"""Every framework's client in three ways: found by `capd run`, with `watch` in the script, and recorded by an oracle.

All three must hold the same series, moments and bits from step 0 on. The oracle (three_ways_oracle.py) imports nothing
of capd and is told the moments by the script itself. A trial forward is no step in any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.three_ways.three_ways_compare import Records, differences
from tests.integration.three_ways.three_ways_running import Runs
from tests.integration.three_ways.three_ways_table import ROWS, Row
from tests.kit.launching import needs

pytestmark = pytest.mark.timeout(1600)  # the first test of a group waits for all of its jobs

LINEAR = {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
ATTENTION = {"query", "key", "value", "grad_query", "grad_key", "grad_value"}
LACKING = {"lazy": ATTENTION, "odd": ATTENTION, "variants": {"grad_input"}}
"""Row → tensors that no product of it has: it has no attention, or its only linear reads what needs no gradient."""


def marks_of(row: Row) -> list[pytest.MarkDecorator]:
    slow = [] if row.default else [pytest.mark.slow]
    return [*slow, *([needs(row.package)] if row.package else [])]


every_row = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks_of(row)) for name, row in ROWS.items()]
)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with ExitStack() as stack:
        yield Runs(stack)


@every_row
def test_what_is_found_what_is_watched_and_what_an_oracle_sees_are_the_same(runs: Runs, name: str) -> None:
    done = runs.of(name)

    wrong = {
        "found": differences(done.found, done.oracle),
        "watched": differences(done.watched, done.oracle),
    }
    assert not any(wrong.values()), "\n".join(
        f"{way}, one of {len(lines)}: {line}" for way, lines in wrong.items() for line in lines[:10]
    )
    found, watched = done.series
    assert found == watched
    # Nothing above is said of nothing.
    names = {where.tensor_name for where in done.oracle}
    assert names == (LINEAR | ATTENTION) - LACKING.get(name, set())
    assert {where.rank for where in done.oracle} == set(range(ROWS[name].ranks))
    assert {where.iteration for where in done.oracle} == {0, 1}
    assert {where.micro_batch for where in done.oracle} >= {0, 1}
    assert all(held.bits or not all(held.shape) for held in done.oracle.values())
    print(
        f"{name}: {len(done.oracle)} records of {len(found)} series on {ROWS[name].ranks} ranks, thrice the same"
    )


def test_a_record_that_is_missing_moved_or_other_in_one_bit_is_found_out(runs: Runs) -> None:
    truth = runs.of("plain").oracle
    first = next(where for where in truth if where.tensor_name == "grad_output")
    held = truth[first]

    def without() -> Records:
        return {where: held for where, held in truth.items() if where != first}

    flipped = held._replace(bits=bytes([held.bits[0] ^ 1]) + held.bits[1:])
    moved = first._replace(micro_batch=len(truth))
    shifted = {
        where._replace(micro_batch=where.micro_batch + 1) if where.iteration == 0 else where: held
        for where, held in truth.items()
    }

    assert differences(truth, truth) == []
    assert len(differences(without(), truth)) == 1
    assert len(differences({**truth, first: flipped}, truth)) == 1
    assert len(differences({**without(), moved: held}, truth)) == 2
    assert differences(shifted, truth)
