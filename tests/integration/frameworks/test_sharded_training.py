"""DDP, FSDP1, FSDP2 and DTensor tensor parallelism: ranks train a tiny transformer in every way, once.

Two ranks in the ways with one dimension, in the slow tier also four: data parallel and tensor parallel by twos.

What there must be follows from the sizes in sharded_models.py, values from algebra between captured tensors: on each
rank for itself, and over the ranks for the whole tensors that the recorded placements say the parts belong to.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit.algebra import (
    Captures,
    Entry,
    Mismatch,
    attention,
    check_attention,
    check_linear,
    controls,
    error_of,
)
from tests.kit.expected import Expected
from tests.kit.launching import run_ranks
from tests.kit.models.sharded_models import (
    LAYERS,
    LINEARS,
    MICRO_BATCHES,
    STEPS,
    WIDTH,
    WORDS,
    expect,
)
from tests.kit.tiers import rows, rows_wanted

JOB = Path(__file__).with_name("sharded_job.py")
ON_TWO = (
    "ddp", "ddp_compiled", "fsdp1", "fsdp2", "fsdp2_bf16", "fsdp2_compiled", "tp", "tp_sequence", "tp_compiled",
    "fsdp2_tp",
)  # fmt: skip
ON_FOUR = ("fsdp2_tp_reentrant", "fsdp2_tp_non_reentrant", "tp_reentrant", "tp_non_reentrant")
"""As in sharded_job.py, in its order."""
QUICK = ("ddp", "fsdp2", "tp_sequence", "fsdp2_tp")
WAYS = rows((*ON_TWO, *ON_FOUR), QUICK)
TENSOR_PARALLEL = rows((way for way in (*ON_TWO, *ON_FOUR) if "tp" in way), QUICK)

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest) -> Iterator[Captures]:
    yield from trained(2, ON_TWO, request)


@pytest.fixture(scope="module")
def on_four(request: pytest.FixtureRequest) -> Iterator[Captures]:
    yield from trained(4, ON_FOUR, request)


def trained(ranks: int, all_ways: tuple[str, ...], request: pytest.FixtureRequest) -> Iterator[Captures]:
    wanted = rows_wanted(request, "way")
    ways = [way for way in all_ways if way in wanted]
    begins.update({way: STEPS * number for number, way in enumerate(ways)})
    with tempfile.TemporaryDirectory(prefix="capd-sharded-") as name:
        yield Captures.of_store(run_ranks(JOB, ranks, Path(name), *ways))


begins: dict[str, int] = {}
"""Way → its first iteration: one process runs those that are wanted one after the other."""


@pytest.fixture
def captures(way: str, request: pytest.FixtureRequest) -> Captures:
    """Everything that the ranks captured that went this way, of all their ways."""
    found: Captures = request.getfixturevalue("on_four" if way in ON_FOUR else "on_two")
    return found


def ranks(way: str) -> int:
    return 4 if way in ON_FOUR else 2


def of(captures: Captures, way: str) -> Captures:
    """What one way captured by its watch."""
    return captures.without(
        lambda r: not r.call.module.startswith(f"{way}.") or r.call.module.endswith(".reduced")
    )


def expected(way: str) -> Expected:
    """All that a watch of the transformer captures if a linear's weight is split as the way splits it."""
    found = Expected(
        steps=range(begins[way], begins[way] + STEPS), micro_batches=MICRO_BATCHES, ranks=range(ranks(way))
    )
    parts = 2 if "tp" in way else 1
    expect(found, way, parts=parts, split_head=parts > 1 and by_sequence(way))
    return found


def by_sequence(way: str) -> bool:
    """Whether tensor parallelism splits the head, too, and the tokens between the products."""
    return way not in ("tp", "tp_non_reentrant")


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
    calls = ranks(way) * STEPS * MICRO_BATCHES

    assert check_linear(mine) == dict.fromkeys(("Y", "dX", "dW"), calls * (len(LINEARS) * LAYERS + 1))
    compared = check_attention(
        mine,
        compute=lambda q, k, v: attention(q, k, v, causal=True),
        tolerance=0.02 if "bf16" in way else 1e-5,
    )
    assert compared == dict.fromkeys(("O", "dQ", "dK", "dV"), calls * LAYERS)


@pytest.mark.parametrize("way", rows(["ddp", "fsdp2", "tp_sequence", "fsdp2_tp_reentrant"], QUICK))
def test_a_swapped_moment_or_an_overwritten_value_is_found_out(captures: Captures, way: str) -> None:
    linears = of(captures, way).without(lambda r: r.call.layer_type != "linear")
    for wrong in controls(linears, "input", "output", "grad_output", "grad_weight"):
        with pytest.raises(Mismatch):
            check_linear(wrong)


@pytest.mark.parametrize("way", rows(["ddp", "ddp_compiled", "fsdp1", "fsdp2", "fsdp2_compiled"], QUICK))
def test_gradients_of_a_rank_are_its_own_and_add_up_to_what_the_optimizer_gets(
    captures: Captures, way: str
) -> None:
    own = [e for e in of(captures, way).entries if e.record.tensor_name == "grad_weight"]
    reduced = [e for e in captures.entries if e.record.call.module == f"{way}.reduced"]
    steps = {e.record.call.iteration for e in reduced}
    assert len(steps) == STEPS
    for step in steps:
        mine: dict[int, Tensor] = defaultdict(lambda: torch.zeros(()))
        for entry in own:
            if entry.record.call.module == f"{way}.layers.0.up" and entry.record.call.iteration == step:
                mine[entry.record.call.rank] = mine[entry.record.call.rank] + entry.tensor
        found = [e for e in reduced if e.record.call.iteration == step]
        assert len(mine) == 2
        assert len(found) == 2 or way == "fsdp1", "all of the parameter may lie on one rank"
        mean = sum(mine.values(), torch.zeros(())) / 2
        if "fsdp2" in way:
            assert error_of(whole(found), mean) < 1e-5
        else:
            flat = [e.tensor.flatten() for e in sorted(found, key=lambda e: e.record.call.rank)]
            parts = torch.cat(flat) if way == "fsdp1" else flat[0]
            assert error_of(parts, mean.flatten()) < 1e-5
        assert error_of(mine[0], mine[1]) > 1e-3, "the ranks trained on other tokens"


@pytest.mark.parametrize("way", rows(ON_FOUR[:2], QUICK))
def test_parts_of_a_gradient_on_a_mesh_put_together_are_the_mean_of_the_groups(
    captures: Captures, way: str
) -> None:
    """Tensor parallelism splits it first, although it is the inner dimension of the mesh."""
    name = f"{way}.layers.0.up"
    own = wholes(of(captures, way).without(lambda r: r.call.module != name))
    reduced = [e for e in captures.entries if e.record.call.module == f"{way}.reduced"]
    steps = {e.record.call.iteration for e in reduced}
    assert len(steps) == STEPS
    for step in steps:
        found = whole([e for e in reduced if e.record.call.iteration == step])
        gradients = [t["grad_weight"] for (_, iteration, *_), t in own.items() if iteration == step]
        assert len(gradients) == 2 * MICRO_BATCHES
        assert error_of(found, torch.stack(gradients).sum(0) / 2) < 1e-5


def whole(parts: list[Entry], mesh: tuple[str, ...] = ()) -> Tensor:
    """The tensor that ranks hold parts of, put together as their attributes say, the last split first."""
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
    """(module, iteration, micro-batch, data parallel rank) → whole tensors of a tensor parallel linear."""
    parts: dict[Any, list[Entry]] = defaultdict(list)
    for entry in captures.entries:
        if entry.record.call.layer_type == "linear" and "tp_placement" in entry.attributes:
            call, _, name = entry.record
            group = call.rank // 2
            parts[(call.module, call.iteration, call.micro_batch, group), name].append(entry)
    found: dict[tuple[Any, ...], dict[str, Tensor]] = defaultdict(dict)
    for (where, name), mine in parts.items():
        found[where][name] = whole(mine, ("tp",))
    return found


@pytest.mark.parametrize("way", TENSOR_PARALLEL)
def test_parts_put_together_by_their_placements_are_the_whole_product(captures: Captures, way: str) -> None:
    found = wholes(of(captures, way))
    calls = ranks(way) // 2 * STEPS * MICRO_BATCHES
    assert len(found) == (len(LINEARS) * LAYERS + by_sequence(way)) * calls
    for (module, iteration, _, group), tensors in found.items():
        out, into = LINEARS.get(module.rpartition(".")[2], (WORDS, WIDTH))
        weight = found[module, iteration, 0, group]["weight"]
        rows_x, rows_dy = (tensors[name].flatten(0, -2) for name in ("input", "grad_output"))
        assert weight.shape == tensors["grad_weight"].shape == (out, into)
        assert error_of(tensors["output"], tensors["input"] @ weight.t()) < 1e-5
        assert error_of(tensors["grad_input"], tensors["grad_output"] @ weight) < 1e-5
        assert error_of(tensors["grad_weight"], rows_dy.t() @ rows_x) < 1e-5


@pytest.mark.parametrize("way", TENSOR_PARALLEL)
def test_placements_are_those_of_the_product_itself_whichever_came_first(
    captures: Captures, way: str
) -> None:
    """Watched before or after it was parallelised, compiled or not."""
    column = {"input": "R", "weight": "S(0)", "output": "S(2)", "grad_output": "S(2)", "grad_weight": "S(0)"}
    row = {"input": "S(2)", "weight": "S(1)", "output": "P(sum)", "grad_output": "R", "grad_weight": "S(1)"}
    for name, placements in (("up", column), ("down", row)):
        mine = of(captures, way).without(lambda r, name=name: r.call.module != f"{way}.layers.0.{name}")
        assert placements.keys() <= {entry.record.tensor_name for entry in mine.entries}
        for entry in mine.entries:
            tensor, attributes = entry.record.tensor_name, entry.attributes
            if tensor in placements:
                assert attributes["tp_placement"] == placements[tensor], (name, tensor)
            assert (attributes["tp_rank"], attributes["tp_size"]) == (entry.record.call.rank % 2, 2)


@pytest.mark.parametrize("way", rows(["fsdp2", "tp", "fsdp2_tp", *ON_FOUR[1:3]], QUICK))
def test_all_tensors_of_a_model_on_a_mesh_say_where_in_it_their_rank_is(captures: Captures, way: str) -> None:
    names = {"fsdp2": ("dp",), "tp": ("tp",)}.get(way, ("dp", "tp"))
    for entry in of(captures, way).entries:
        attributes = entry.attributes
        rank = 0
        for name in names:
            rank = rank * attributes[f"{name}_size"] + attributes[f"{name}_rank"]
        assert rank == entry.record.call.rank, entry.record
