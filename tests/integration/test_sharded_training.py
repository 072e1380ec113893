"""DDP, FSDP1, FSDP2 and DTensor tensor parallelism: two ranks train a tiny transformer in every way, once.

What there must be follows from the sizes in sharded_models.py, values from algebra between captured tensors: on each
rank for itself, and over the ranks for the whole tensors that the recorded placements say the parts belong to.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.algebra import (
    Captures,
    Entry,
    Mismatch,
    attention,
    check_attention,
    check_linear,
    controls,
    error_of,
)
from tests.integration.expected import Expected
from tests.integration.launching import run_ranks
from tests.integration.sharded_models import (
    LAYERS,
    LINEARS,
    MICRO_BATCHES,
    STEPS,
    WIDTH,
    WORDS,
    expect,
)

WAYS = (
    "ddp", "ddp_compiled", "fsdp1", "fsdp2", "fsdp2_bf16", "fsdp2_compiled", "tp", "tp_sequence", "tp_compiled",
    "fsdp2_tp",
)  # fmt: skip
"""As in sharded_job.py, in its order."""
TENSOR_PARALLEL = tuple(way for way in WAYS if "tp" in way)
RANKS = 2

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def captures() -> Iterator[Captures]:
    """Everything that the ranks captured, of all ways."""
    with tempfile.TemporaryDirectory(prefix="capd-sharded-") as name:
        yield Captures.of_store(run_ranks("sharded_job.py", RANKS, Path(name)))


def of(captures: Captures, way: str) -> Captures:
    """What one way captured by its watch."""
    return captures.without(
        lambda r: not r.call.module.startswith(f"{way}.") or r.call.module.endswith(".reduced")
    )


def expected(way: str, ranks: int = RANKS) -> Expected:
    """All that a watch of the transformer captures if a linear's weight is split as the way splits it."""
    first = STEPS * WAYS.index(way)
    found = Expected(steps=range(first, first + STEPS), micro_batches=MICRO_BATCHES, ranks=range(ranks))
    parts = 2 if way in TENSOR_PARALLEL else 1
    expect(found, way, parts=parts, split_head=parts > 1 and way != "tp")
    return found


@pytest.mark.parametrize("way", WAYS)
def test_exactly_the_products_of_the_model_are_captured_each_at_its_moment(
    captures: Captures, way: str
) -> None:
    oracle = expected(way)
    oracle.check(of(captures, way))
    for entry in of(captures, way).entries:
        assert (entry.key.layer, entry.key.stack) == oracle.layers[entry.key.module]
        assert entry.key.quant_type == ("bf16" if way == "fsdp2_bf16" else "fp32")


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_s_tensors_satisfy_the_algebra_of_its_products(captures: Captures, way: str) -> None:
    mine = of(captures, way)
    calls = RANKS * STEPS * MICRO_BATCHES

    assert check_linear(mine) == dict.fromkeys(("Y", "dX", "dW"), calls * (len(LINEARS) * LAYERS + 1))
    compared = check_attention(
        mine,
        compute=lambda q, k, v: attention(q, k, v, causal=True),
        tolerance=0.02 if "bf16" in way else 1e-5,
    )
    assert compared == dict.fromkeys(("O", "dQ", "dK", "dV"), calls * LAYERS)


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp_sequence"])
def test_a_swapped_moment_or_an_overwritten_value_is_found_out(captures: Captures, way: str) -> None:
    linears = of(captures, way).without(lambda r: r.call.layer_type != "linear")
    for wrong in controls(linears, "input", "output", "grad_output", "grad_weight"):
        with pytest.raises(Mismatch):
            check_linear(wrong)


@pytest.mark.parametrize("way", ["ddp", "ddp_compiled", "fsdp1", "fsdp2", "fsdp2_compiled"])
def test_gradients_of_a_rank_are_its_own_and_add_up_to_what_the_optimizer_gets(
    captures: Captures, way: str
) -> None:
    own = [e for e in of(captures, way).entries if e.record.tensor_name == "grad_weight"]
    reduced = [e for e in captures.entries if e.record.call.module == f"{way}.reduced"]
    for step in {e.record.call.iteration for e in reduced}:
        mine: dict[int, Tensor] = defaultdict(lambda: torch.zeros(()))
        for entry in own:
            if entry.record.call.module == f"{way}.layers.0.up" and entry.record.call.iteration == step:
                mine[entry.record.call.rank] = mine[entry.record.call.rank] + entry.tensor
        found = [e for e in reduced if e.record.call.iteration == step]
        assert len(found) == RANKS == len(mine)
        mean = sum(mine.values(), torch.zeros(())) / RANKS
        if "fsdp2" in way:
            assert error_of(whole(found), mean) < 1e-5
        else:
            flat = [e.tensor.flatten() for e in sorted(found, key=lambda e: e.record.call.rank)]
            parts = torch.cat(flat) if way == "fsdp1" else flat[0]
            assert error_of(parts, mean.flatten()) < 1e-5
        assert error_of(mine[0], mine[1]) > 1e-3, "the ranks trained on other tokens"


def whole(parts: list[Entry], mesh: tuple[str, ...] = ()) -> Tensor:
    """The tensor that ranks hold parts of, put together as their attributes say, innermost mesh dimension first."""
    mesh = mesh or tuple(parts[0].attributes["mesh"])
    if not mesh:
        assert len(parts) == 1
        return parts[0].tensor
    *outer, inner = mesh
    groups: dict[Any, list[Entry]] = defaultdict(list)
    for part in parts:
        groups[tuple(part.attributes[f"{name}_rank"] for name in outer)].append(part)
    joined = [_joined(group, inner) for _, group in sorted(groups.items())]
    return whole(joined, tuple(outer)) if outer else joined[0].tensor


def _joined(parts: list[Entry], name: str) -> Entry:
    placement = parts[0].attributes[f"{name}_placement"]
    tensors = [p.tensor for p in sorted(parts, key=lambda p: p.attributes[f"{name}_rank"])]
    assert len(tensors) == parts[0].attributes[f"{name}_size"]
    if placement.startswith("S("):
        together = torch.cat(tensors, dim=int(placement[2:-1]))
    elif placement == "R":
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), "replicas differ"
        together = tensors[0]
    else:
        assert placement == "P(sum)"
        together = torch.stack(tensors).sum(0)
    return parts[0]._replace(tensor=together)


def wholes(captures: Captures) -> dict[tuple[Any, ...], dict[str, Tensor]]:
    """(module, iteration, micro-batch) → whole tensors of a tensor parallel linear."""
    parts: dict[Any, list[Entry]] = defaultdict(list)
    for entry in captures.entries:
        if entry.record.call.layer_type == "linear" and "tp_placement" in entry.attributes:
            call, _, name = entry.record
            parts[(call.module, call.iteration, call.micro_batch), name].append(entry)
    found: dict[tuple[Any, ...], dict[str, Tensor]] = defaultdict(dict)
    for (where, name), group in parts.items():
        found[where][name] = whole(group, ("tp",))
    return found


@pytest.mark.parametrize("way", TENSOR_PARALLEL)
def test_parts_put_together_by_their_placements_are_the_whole_product(captures: Captures, way: str) -> None:
    found = wholes(of(captures, way))
    assert len(found) == (len(LINEARS) * LAYERS + (way != "tp")) * STEPS * MICRO_BATCHES
    for (module, iteration, _), tensors in found.items():
        out, into = LINEARS.get(module.rpartition(".")[2], (WORDS, WIDTH))
        weight = found[module, iteration, 0]["weight"]
        rows_x, rows_dy = (tensors[name].flatten(0, -2) for name in ("input", "grad_output"))
        assert weight.shape == tensors["grad_weight"].shape == (out, into)
        assert error_of(tensors["output"], tensors["input"] @ weight.t()) < 1e-5
        assert error_of(tensors["grad_input"], tensors["grad_output"] @ weight) < 1e-5
        assert error_of(tensors["grad_weight"], rows_dy.t() @ rows_x) < 1e-5


def test_placements_are_those_of_the_product_itself_whichever_came_first(captures: Captures) -> None:
    """Watched before or after it was parallelised, compiled or not."""
    column = {"input": "R", "weight": "S(0)", "output": "S(2)", "grad_output": "S(2)", "grad_weight": "S(0)"}
    row = {"input": "S(2)", "weight": "S(1)", "output": "P(sum)", "grad_output": "R", "grad_weight": "S(1)"}
    for way, (name, placements) in itertools.product(TENSOR_PARALLEL, (("up", column), ("down", row))):
        for entry in of(captures, way).entries:
            call, _, tensor = entry.record
            if call.module == f"{way}.layers.1.{name}" and tensor in placements:
                assert entry.attributes["tp_placement"] == placements[tensor], (way, name, tensor)
                assert (entry.attributes["tp_rank"], entry.attributes["tp_size"]) == (call.rank, RANKS)


def test_all_tensors_of_a_model_on_a_mesh_say_where_in_it_their_rank_is(captures: Captures) -> None:
    for way, names in (("fsdp2", ("dp",)), ("tp", ("tp",)), ("fsdp2_tp", ("dp", "tp"))):
        for entry in of(captures, way).entries:
            attributes = entry.attributes
            rank = 0
            for name in names:
                rank = rank * attributes[f"{name}_size"] + attributes[f"{name}_rank"]
            assert rank == entry.record.call.rank, (way, entry.record)
