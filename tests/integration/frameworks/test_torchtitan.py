"""torchtitan: its own Trainer trains its debug model on CPUs, on one rank, with tensor parallelism, and fully sharded.

CAPD_TEST_TORCHTITAN names the directories where torchtitan and what it needs lie (pip install --target), separated by
colons.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from capd_client.protocol.kinds import ATTENTION, LINEAR
from tests.integration.frameworks.torchtitan_job import (
    LAYERS,
    MICRO_BATCHES,
    ROWS,
    STEPS,
    TOKENS,
    VOCABULARY,
    WAYS,
)
from tests.kit.algebra import Captures, attention, check_attention, check_linear
from tests.kit.expected import ATTENTION as ATTENTION_BY_DEFAULT
from tests.kit.expected import LINEAR as LINEAR_BY_DEFAULT
from tests.kit.expected import Expected
from tests.kit.launching import needs, run_ranks

WIDTH, HEADS, HIDDEN, CHUNKS = 256, 16, 768, 8  # of the debug model and its loss
JOB = Path(__file__).with_name("torchtitan_job.py")
RANKS_OF = {way: ranks for ranks, ways in WAYS.items() for way in ways}
LINEARS = {
    "attention.qkv_linear.wqkv": (3 * WIDTH, WIDTH),
    "attention.wo": (WIDTH, WIDTH),
    "feed_forward.w1": (HIDDEN, WIDTH),
    "feed_forward.w2": (WIDTH, HIDDEN),
    "feed_forward.w3": (HIDDEN, WIDTH),
}
"""Name in a block → [out, in] of its weight."""

pytestmark = [pytest.mark.fault, pytest.mark.timeout(500), needs("torchtitan")]


@pytest.fixture(scope="module")
def captures() -> Iterator[Captures]:
    """Everything that was captured, of all ways; the jobs themselves see to it that results are the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    entries = []
    for ranks in WAYS:
        with tempfile.TemporaryDirectory(prefix="capd-torchtitan-") as name:
            store = run_ranks(JOB, ranks, Path(name), package="torchtitan")
            entries += Captures.of_store(store).entries
    yield Captures(entries)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def found() -> Iterator[Captures]:
    """What is captured of a script that knows nothing of capd, and keeps a method of its trainer."""
    with tempfile.TemporaryDirectory(prefix="capd-torchtitan-") as name:
        settings = {"package": "torchtitan", "CAPD_STEPS": "all"}
        yield Captures.of_store(run_ranks(JOB, 1, Path(name), "found", **settings))


def expected(way: str, *, tensors: Any = LINEAR.tensors, attention: Any = ATTENTION.tensors) -> Expected:
    """What a way captures; an empty one: of a model that is found, and so has no name."""
    ranks = RANKS_OF.get(way, 1)
    parts = 2 if "tp2" in way else 1
    name = f"{way}." if way else ""
    found = Expected(steps=range(STEPS), micro_batches=MICRO_BATCHES, ranks=range(ranks))
    for layer in range(LAYERS):
        at = (layer, way)
        for linear, (out, into) in LINEARS.items():
            by_rows = linear in ("attention.wo", "feed_forward.w2")
            inputs, outputs = (into // parts, out) if by_rows else (into, out // parts)
            module = f"{name}layers.{layer}.{linear}"
            found.linear(module, (ROWS, TOKENS), inputs, outputs, at=at, tensors=tensors)
        heads = (ROWS, HEADS // parts, TOKENS, WIDTH // HEADS)
        heads = (ROWS, TOKENS, HEADS // parts, WIDTH // HEADS) if "flex" in way else heads
        shapes = dict.fromkeys(("query", "key", "value", "output"), heads)
        module = f"{name}layers.{layer}.attention.inner_attention"
        found.attention(module, shapes, tensors=attention, at=at)
    rows = (ROWS, TOKENS // CHUNKS)
    found.linear(f"{name}lm_head", rows, WIDTH, VOCABULARY // parts, calls=CHUNKS, tensors=tensors)
    # Each chunk of the loss has a backward of its own, and so a gradient of the weight.
    head = [record for record in found.records if record.call.module == f"{name}lm_head"]
    for record in (record for record in head if record.tensor_name == "grad_weight"):
        for call in range(1, CHUNKS):
            found.records[record._replace(call=record.call._replace(call=call))] += 1
    return found


@pytest.mark.parametrize("way", RANKS_OF)
def test_the_trainer_s_products_are_captured_and_nothing_more(captures: Captures, way: str) -> None:
    mine = captures.of(way)
    expected(way).check(mine)

    head = mine.of(f"{way}.lm_head")
    blocks = mine.without(lambda record: record.call.module == f"{way}.lm_head")
    calls = RANKS_OF[way] * STEPS * MICRO_BATCHES
    assert check_linear(blocks) == dict.fromkeys(("Y", "dX", "dW"), calls * LAYERS * len(LINEARS))
    products = check_linear(head, tied=[f"{way}.lm_head"])
    assert products == dict.fromkeys(("Y", "dX"), calls * CHUNKS)
    for tensors in head.calls("linear").values():
        dy, x = tensors["backward grad_output"].flatten(0, 1), tensors["input"].flatten(0, 1)
        assert torch.equal(tensors["backward grad_weight"], dy.t() @ x)
    compared = check_attention(
        mine,
        compute=lambda q, k, v: attention(q, k, v, causal=True),
        layout="bshd" if "flex" in way else "bhsd",
        tolerance=1e-5,
    )
    assert compared == dict.fromkeys(("O", "dQ", "dK", "dV"), calls * LAYERS)


def test_a_model_that_is_found_has_the_moments_of_a_trainer_whose_methods_the_script_kept(
    found: Captures,
) -> None:
    expected("", tensors=LINEAR_BY_DEFAULT, attention=ATTENTION_BY_DEFAULT).check(found)
    products = STEPS * MICRO_BATCHES * (LAYERS * len(LINEARS) + CHUNKS)
    assert check_linear(found) == {"Y": products}


def test_series_say_where_the_rank_stood(captures: Captures) -> None:
    for way, dimension in (("tp2", "tp"), ("tp2_flex", "tp"), ("fsdp2", "fsdp")):
        for entry in captures.of(way).entries:
            place = {f"{dimension}_rank": entry.record.call.rank, f"{dimension}_size": 2}
            assert entry.attributes.items() >= place.items(), (entry.record, entry.attributes)
