"""DeepSpeed, ZeRO-3 above all: two ranks train a tiny transformer, once, parameters gathered for every forward.

CAPD_TEST_DEEPSPEED names the directories where DeepSpeed and what it needs lie (pip install --target), separated by
colons. It runs on CPUs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.kit.algebra import Captures, attention, check_attention, check_linear
from tests.kit.expected import Expected
from tests.kit.launching import needs, run_ranks
from tests.kit.models.sharded_models import LAYERS, LINEARS, MICRO_BATCHES, STEPS, expect

JOB = Path(__file__).with_name("deepspeed_job.py")
RANKS_OF = {"zero3_before": 2, "zero3_after": 2, "zero3_rehooked": 1, "zero3_init": 2, "zero2": 2}
"""The ways of deepspeed_job.py, and how many ranks watch."""

pytestmark = [pytest.mark.fault, pytest.mark.timeout(500), needs("deepspeed")]


@pytest.fixture(scope="module")
def captures() -> Iterator[Captures]:
    """Everything that the ranks captured, of all ways; the job itself sees to it that results are the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="capd-deepspeed-") as name:
        store = run_ranks(JOB, max(RANKS_OF.values()), Path(name), package="deepspeed", DS_ACCELERATOR="cpu")
        yield Captures.of_store(store)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("way", RANKS_OF)
def test_the_gathered_weights_are_captured_with_all_else_and_nothing_more(
    captures: Captures, way: str
) -> None:
    ranks = RANKS_OF[way]
    mine = captures.of(way)
    wanted = Expected(steps=range(STEPS), micro_batches=MICRO_BATCHES, ranks=range(ranks))
    expect(wanted, way)
    wanted.check(mine)
    assert {entry.key.quant_type for entry in mine.entries} == {"fp32"}

    calls = ranks * STEPS * MICRO_BATCHES
    assert check_linear(mine) == dict.fromkeys(("Y", "dX", "dW"), calls * (len(LINEARS) * LAYERS + 1))
    heads = check_attention(mine, compute=lambda q, k, v: attention(q, k, v, causal=True), tolerance=1e-5)
    assert heads == dict.fromkeys(("O", "dQ", "dK", "dV"), calls * LAYERS)
