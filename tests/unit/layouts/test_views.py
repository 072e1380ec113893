"""Tensors of two frameworks: fused projections are cut, rotary pairs and axes turned, padded words cropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from capd.layouts.judging import Comparison, judge, tasks_of
from capd.layouts.limits import Limits
from capd.layouts.names import load_map
from capd.layouts.samples import paired_samples
from capd.layouts.views import aspects_of
from capd.layouts.whole_run import WholeRun
from capd.store.read.store import open_store
from capd_client.protocol.key import Key
from tests.kit.store.parts import linear, put_parts

HEADS, GROUPS, SIZE, HIDDEN = 4, 2, 4, 6
DRAW = np.random.default_rng(11)
Part = tuple[Key, np.ndarray[Any, Any], dict[str, Any]]


def draw(*shape: int) -> np.ndarray[Any, Any]:
    return DRAW.standard_normal(shape).astype(np.float32)


def run(root: Path, parts: list[Part]) -> WholeRun:
    return WholeRun(open_store(put_parts(root, parts, iteration=0, micro_batch=0)))


def of(module: str, tensor: str, values: np.ndarray[Any, Any], **told: Any) -> Part:
    operation = "backward" if tensor.startswith("grad_") else "forward"
    return linear(tensor, module=module, operation=operation), values, told


def compared(reference: WholeRun, other: WholeRun, name: str) -> Comparison:
    aspects = aspects_of(reference, other, load_map(name))
    samples = paired_samples(reference, other, aspects.found)
    found = Comparison(reference, other, samples, Limits(reference, (), 4.0), aspects)
    for _ in judge(found, tasks_of(found)):
        pass
    return found


def interleaved(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows [heads · size, …] with real and imaginary parts of each rotary pair next to each other."""
    halves = rows.reshape(-1, 2, SIZE // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def test_torchtitan_s_projections_are_cut_from_megatron_s(tmp_path: Path) -> None:
    q, k, v = draw(HEADS * SIZE, HIDDEN), draw(GROUPS * SIZE, HIDDEN), draw(GROUPS * SIZE, HIDDEN)
    per = HEADS // GROUPS * SIZE
    fused = np.concatenate(
        [
            block
            for group in range(GROUPS)
            for block in (
                q[group * per : (group + 1) * per],
                k[group * SIZE : (group + 1) * SIZE],
                v[group * SIZE : (group + 1) * SIZE],
            )
        ]
    )
    x, terms = draw(3, 2, HIDDEN), [draw(3, 2, HIDDEN) for _ in range(3)]
    here, there = "decoder.layers.0.self_attention.linear_qkv", "layers.0.attention"
    told = {"qkv_heads": HEADS, "qkv_groups": GROUPS, "qkv_head_dim": SIZE}
    megatron = run(tmp_path / "a", [
        of(here, "input", x, **told), of(here, "weight", fused, **told), of(here, "output", x @ fused.T, **told),
        of(here, "grad_input", sum(terms, np.zeros_like(x)), **told),
    ])  # fmt: skip
    turned = x.swapaxes(0, 1)
    weights = {"wq": interleaved(q), "wk": interleaved(k), "wv": v}
    titan = run(tmp_path / "b", [
        part
        for (name, weight), term in zip(weights.items(), terms, strict=True)
        for part in (
            of(f"{there}.{name}", "input", turned), of(f"{there}.{name}", "weight", weight),
            of(f"{there}.{name}", "output", turned @ weight.T),
            of(f"{there}.{name}", "grad_input", term.swapaxes(0, 1)),
        )
    ])  # fmt: skip
    for one, two in ((megatron, titan), (titan, megatron)):
        found = compared(one, two, "megatron-torchtitan")
        assert found.beyond == []
        assert {judged.aspect.piece for judged in found.judgements} == {"", "query", "key", "value"}
        assert len(found.judgements) == 8
        assert found.samples.rule == "content"
        assert all(
            judged.is_bit_equal for judged in found.judgements if judged.aspect.name.tensor == "weight"
        )


def test_words_that_only_one_run_has_are_cropped(tmp_path: Path) -> None:
    x, weight = draw(3, 2, HIDDEN), draw(7, HIDDEN)
    padded = np.concatenate([weight, np.zeros((1, HIDDEN), np.float32)])
    megatron = run(
        tmp_path / "a",
        [
            of("output_layer", "input", x),
            of("output_layer", "weight", padded),
            of("output_layer", "output", x @ padded.T),
        ],
    )
    turned = x.swapaxes(0, 1)
    llama = run(
        tmp_path / "b",
        [
            of("lm_head", "input", turned),
            of("lm_head", "weight", weight),
            of("lm_head", "output", turned @ weight.T),
        ],
    )
    found = compared(megatron, llama, "megatron-hf")
    assert (len(found.judgements), found.beyond) == (3, [])
    assert found.cropped_words == 1
