"""DeepSpeed in a script that knows nothing of capd: the engine that `capd run` finds, from its first micro-batch on.

CAPD_TEST_DEEPSPEED names the directories where DeepSpeed and what it needs lie, as for test_deepspeed.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.algebra import Captures
from tests.kit.expected import Expected
from tests.kit.launching import needs, run_ranks

RANKS, WIDTH, ROWS, STEPS, MICRO_BATCHES = 2, 8, 2, 2, 3  # as in found_deepspeed_job.py

JOB = Path(__file__).with_name("found_deepspeed_job.py")
pytestmark = [pytest.mark.fault, pytest.mark.timeout(500), needs("deepspeed")]


@pytest.fixture(scope="module", params=range(4), ids=lambda stage: f"zero{stage}")
def captures(request: pytest.FixtureRequest) -> Iterator[Captures]:
    """What is captured of a ZeRO stage."""
    with tempfile.TemporaryDirectory(prefix="capd-deepspeed-") as name:
        settings = {"package": "deepspeed", "DS_ACCELERATOR": "cpu", "CAPD_STEPS": "all"}
        store = run_ranks(JOB, RANKS, Path(name), str(request.param), **settings)
        yield Captures.of_store(store)


def test_the_first_step_has_the_moments_that_the_engine_counts(captures: Captures) -> None:
    wanted = Expected(steps=range(STEPS), micro_batches=MICRO_BATCHES, ranks=range(RANKS))
    for module in "02":
        wanted.linear(module, (ROWS,), WIDTH, WIDTH)
    wanted.check(captures)
