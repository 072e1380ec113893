"""Megatron in many layouts: whole tensors are those of a run on one rank, and compute the same in Hugging Face.

Every layout trains the same whole model on the same samples (tests/kit/models/megatron_layouts.py).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import capd
from capd.errors import MissingParts
from capd.store.logical.positions import QkvHeads
from capd.store.logical.series import LogicalSeries
from capd_client.protocol.key import Moment
from tests.kit.jobs.layouts import Layout, run_layout
from tests.kit.jobs.products import assert_products_hold
from tests.kit.models.megatron_layouts import sample, values
from tests.kit.store.cli import run_capd
from tests.kit.tiers import rows

pytestmark = pytest.mark.timeout(400)
GROUPS, MOE = {"groups": 2}, {"experts": 4, "layers": 2}
LAYOUTS = {
    "tp2": Layout(tp=2, ranks=2),
    "tp2sp": Layout(tp=2, sp=True, ranks=2),
    "tp2plain": Layout(tp=2, ranks=2, swiglu=False, layers=2),
    "tp4groups": Layout(tp=4, ranks=4, **GROUPS),
    "cp2": Layout(cp=2, ranks=2),
    "cp2tp2sp": Layout(tp=2, cp=2, sp=True, ranks=4),
    "pp2vpp2": Layout(pp=2, vpp=2, ranks=2),
    "pp2tp2": Layout(pp=2, tp=2, ranks=4),
    "dp2": Layout(ranks=2),
    "ep2": Layout(ep=2, ranks=2, **MOE),
    "ep2tp2sp": Layout(ep=2, tp=2, etp=1, sp=True, ranks=2, **MOE),
    "etp2": Layout(tp=2, sp=True, ranks=2, config={"moe_token_dispatcher_type": "allgather"}, **MOE),
}
QUICK = ("tp2sp", "pp2vpp2")
ROUNDING = 1e-5
"""The largest relative error that the order of additions makes in float32 here is 2e-6."""

Store = Any
Run = Callable[[Layout], Store]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Opens the run of a layout, which is trained when the first test asks for it."""
    known: dict[str, Store] = {}
    with tempfile.TemporaryDirectory(prefix="capd-layouts-") as name:

        def trained(layout: Layout) -> Store:
            if layout.json() not in known:
                place = run_layout(layout, Path(name), f"run{len(known)}")
                assert_products_hold(place)
                known[layout.json()] = capd.open(place)
            return known[layout.json()]

        yield trained


def on_one(layout: Layout) -> Layout:
    """The same model on one rank."""
    return replace(layout, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=0, sp=False, ranks=1, config={})


def error(found: Tensor, expected: Tensor) -> float:
    """The error relative to the norm of what is expected (Frobenius)."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


def is_of_expert(one: LogicalSeries) -> bool:
    return ".experts." in one.key.module


def by_name(store: Store) -> dict[str, LogicalSeries]:
    """The tensors by their names without coordinates; those of the first data parallel rank."""
    found: dict[str, LogicalSeries] = {}
    for one in store.logical():
        found.setdefault(one.name.partition("[")[0], one)
    return found


def counterpart(one: LogicalSeries, moment: Moment, layout: Layout) -> Moment:
    """When the run on one rank computed what a data parallel rank computed at a moment."""
    if one.key.tensor_name == "weight":
        return moment
    at = moment.micro_batch * layout.dp + one.coordinates.get("dp", 0)
    return msgspec.structs.replace(moment, micro_batch=at)


@pytest.mark.parametrize("name", rows(LAYOUTS, QUICK))
def test_whole_tensors_are_those_of_a_run_on_one_rank(run: Run, name: str) -> None:
    layout = LAYOUTS[name]
    whole, reference = run(layout), by_name(run(on_one(layout)))

    compared = set()
    for one in whole.logical():
        base = one.name.partition("[")[0]
        expected = reference[base]
        compared.add(base)
        assert one.missing == []
        assert one.spread == 0.0, one
        if is_of_expert(one) and one.key.tensor_name != "weight":
            # Which tokens an expert gets together, and in which order, depends on the ranks.
            if layout.dp == 1:
                assert_same_rows(one, expected)
            continue
        for moment in one.moments:
            found, truth = one.torch(moment), expected.torch(counterpart(one, moment, layout))
            assert found.shape == truth.shape, one
            if one.key.tensor_name == "weight" or layout.pp == layout.ranks:
                assert torch.equal(found, truth), one
            else:
                # Megatron's schedule divides by the micro-batches of a rank.
                scale = layout.dp if one.key.operation == "backward" else 1
                assert error(found, scale * truth) < ROUNDING, (one, moment)
    assert compared == reference.keys()
    samples = {
        (dict(one.coordinates).get("dp", 0))
        for one in whole.logical(tensor_name="input", module="*linear_qkv")
    }
    assert samples == set(range(layout.dp))


def assert_same_rows(one: LogicalSeries, expected: LogicalSeries) -> None:
    """An expert has the same tokens in any order, and a gradient that does not depend on it."""
    for moment in one.moments:
        found, truth = one.torch(moment), expected.torch(moment)
        if one.key.tensor_name != "grad_weight":
            found, truth = found[found[:, 0].argsort()], truth[truth[:, 0].argsort()]
        assert found.shape == truth.shape
        assert error(found, truth) < 10 * ROUNDING, (one, moment)


@pytest.mark.parametrize("name", rows(("tp2sp", "tp4groups", "cp2"), ("tp2sp",)))
def test_weights_cut_into_those_of_hugging_face_compute_the_same(run: Run, name: str) -> None:
    """The gated MLP and the grouped projection are in the right order, or the logits would differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layout = LAYOUTS[name]
    found = by_name(run(layout))
    config = LlamaConfig(
        vocab_size=layout.padded, hidden_size=layout.hidden, intermediate_size=layout.ffn,
        num_hidden_layers=layout.layers, num_attention_heads=layout.heads, num_key_value_heads=layout.groups,
        rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    state = converted(found, layout)
    assert model.load_state_dict(state, strict=True)
    logits = found["output_layer.forward.output"]
    for moment in logits.moments:
        tokens = sample(layout, moment.iteration, moment.micro_batch)[:, :-1]
        with torch.no_grad():
            expected = model(tokens).logits.transpose(0, 1)
        assert error(logits.torch(moment), expected) < ROUNDING


def converted(found: dict[str, LogicalSeries], layout: Layout) -> dict[str, Tensor]:
    """The state of the Hugging Face model from the captured weights; embedding and norms are not captured."""
    state = {
        "model.embed_tokens.weight": values(
            "embedding.word_embeddings.weight", (layout.padded, layout.hidden)
        ),
        "model.norm.weight": values("decoder.final_layernorm.weight", (layout.hidden,)),
        "lm_head.weight": found["output_layer.forward.weight"].torch(0),
    }
    for layer in range(layout.layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
        state |= {
            f"{there}.{own}.weight": values(f"{here}.{name}.weight", (layout.hidden,))
            for name, own in norms.items()
        }
        fused = found[f"{here}.self_attention.linear_qkv.forward.weight"]
        heads = QkvHeads(*(fused.attributes[f"qkv_{what}"] for what in ("heads", "groups", "head_dim")))
        weight = fused.torch(0)
        for letter, at in zip("qkv", heads.fused_rows(), strict=True):
            state[f"{there}.self_attn.{letter}_proj.weight"] = weight[torch.from_numpy(at)]
        state[f"{there}.self_attn.o_proj.weight"] = found[
            f"{here}.self_attention.linear_proj.forward.weight"
        ].torch(0)
        gated = found[f"{here}.mlp.linear_fc1.forward.weight"]
        assert gated.attributes["gated_linear_unit"] is True
        gate, up = gated.torch(0).chunk(2)
        state |= {f"{there}.mlp.gate_proj.weight": gate, f"{there}.mlp.up_proj.weight": up}
        state[f"{there}.mlp.down_proj.weight"] = found[f"{here}.mlp.linear_fc2.forward.weight"].torch(0)
    return state


@pytest.mark.slow
def test_a_padded_vocabulary_is_cropped_to_the_tokenizer_s(run: Run) -> None:
    """Both layouts are padded, and the whole has the words that there are."""
    layout = Layout(tp=2, ranks=2, layers=1, vocabulary=29)
    padded = values("output_layer.weight", (layout.padded, layout.hidden))
    for store in (run(layout), run(on_one(layout))):
        found = by_name(store)
        assert torch.equal(found["output_layer.forward.weight"].torch(0), padded[:29])
        for name in ("forward.output", "backward.grad_output"):
            assert found[f"output_layer.{name}"].shape(0) == (layout.sequence, layout.rows, 29)
        assert found["output_layer.backward.grad_weight"].shape(0) == (29, layout.hidden)
        assert found["output_layer.forward.input"].shape(0) == (layout.sequence, layout.rows, layout.hidden)


@pytest.mark.slow
def test_dropout_is_said(run: Run) -> None:
    """Tensor parallel ranks then draw differently: a comparison has to know."""
    store = run(Layout(layers=1, config={"hidden_dropout": 0.25, "attention_dropout": 0.125}))
    assert {one.attributes["dropout"] for one in store.logical()} == {0.25}
    assert all("dropout" not in one.attributes for one in run(Layout(tp=2, sp=True, ranks=2)).logical())


def test_a_rank_that_captured_nothing_is_named(run: Run, tmp_path: Path) -> None:
    """Rank 1 of a copy keeps one series, so its place is known; every tensor of which it had a part is refused."""
    place = tmp_path / "copy.zarr"
    shutil.copytree(run(LAYOUTS["tp2sp"]).path, place)
    kept = "output_layer"
    removed = run_capd("rm", place, "--series", "*rank1*decoder*", "--yes")
    assert removed.code == 0, removed.err
    store = capd.open(place)
    checked = 0
    for one in store.logical():
        if one.key.module.startswith(kept):
            assert one.torch(0).numel()
        elif one.attributes.get("tp_placement") != "R":
            with pytest.raises(MissingParts, match=r"1 of 2 parts are missing: tp 1 \(rank 1 on node "):
                one.torch(0)
            checked += 1
    assert checked > 20
