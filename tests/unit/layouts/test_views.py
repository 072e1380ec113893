"""Tensors of two frameworks: fused projections are cut, rotary pairs and axes turned, padded words cropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.errors import ConfigError
from capd.layouts.judging import Comparison, judge, tasks_of
from capd.layouts.limits import Limits
from capd.layouts.names import load_map, parse_map
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


def projections() -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """The weights of query, key and value, and the rows of all of them in Megatron's order of groups."""
    q, k, v = draw(HEADS * SIZE, HIDDEN), draw(GROUPS * SIZE, HIDDEN), draw(GROUPS * SIZE, HIDDEN)
    return [q, k, v], in_groups(q, k, v)


def in_groups(*rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    by_group = [one.reshape(GROUPS, -1, HIDDEN) for one in rows]
    return np.concatenate([one[group] for group in range(GROUPS) for one in by_group])


def test_torchtitan_s_projections_are_cut_from_megatron_s(tmp_path: Path) -> None:
    (q, k, v), fused = projections()
    x, terms = draw(3, 2, HIDDEN), [draw(3, 2, HIDDEN) for _ in range(3)]
    here = "decoder.layers.0.self_attention.linear_qkv"
    told = {"qkv_heads": HEADS, "qkv_groups": GROUPS, "qkv_head_dim": SIZE}
    megatron = run(tmp_path / "a", [
        of(here, "input", x, **told), of(here, "weight", fused, **told), of(here, "output", x @ fused.T, **told),
        of(here, "grad_input", sum(terms, np.zeros_like(x)), **told),
    ])  # fmt: skip
    turned = x.swapaxes(0, 1)
    weights = {"wq": interleaved(q), "wk": interleaved(k), "wv": v}
    own = in_groups(*weights.values())
    for number, there in enumerate(("layers.0.attention.qkv_linear", "layers.0.attention")):
        titan = run(tmp_path / f"b{number}", [
            part
            for (name, weight), term in zip(weights.items(), terms, strict=True)
            for part in (
                of(f"{there}.{name}", "input", turned), of(f"{there}.{name}", "weight", weight),
                of(f"{there}.{name}", "output", turned @ weight.T),
                of(f"{there}.{name}", "grad_input", term.swapaxes(0, 1)),
            )
        ])  # fmt: skip
        assert_agree(megatron, titan)
    there = "layers.0.attention.qkv_linear.wqkv"
    assert_agree(megatron, run(tmp_path / "c", [
        of(there, "input", turned), of(there, "weight", own), of(there, "output", turned @ own.T),
        of(there, "grad_input", sum(terms, np.zeros_like(x)).swapaxes(0, 1)),
    ]))  # fmt: skip
    # Without the order of rotary pairs.
    wrong = run(tmp_path / "d", [of(there, "input", turned), of(there, "weight", fused)])
    found = compared(megatron, wrong, "megatron-torchtitan")
    assert [one.aspect.text for one in found.beyond] == [
        f"{here}.forward.weight[query]", f"{here}.forward.weight[key]"
    ]  # fmt: skip


def assert_agree(megatron: WholeRun, titan: WholeRun) -> None:
    for one, two in ((megatron, titan), (titan, megatron)):
        found = compared(one, two, "megatron-torchtitan")
        assert found.beyond == []
        assert {judged.aspect.piece for judged in found.judgements} == {"", "query", "key", "value"}
        assert len(found.judgements) == 8
        assert found.samples.rule == "content"
        assert all(
            judged.is_bit_equal for judged in found.judgements if judged.aspect.name.tensor == "weight"
        )


def test_two_modules_that_a_map_makes_one_are_refused(tmp_path: Path) -> None:
    here = run(tmp_path / "a", [of(name, "input", draw(2, HIDDEN)) for name in ("up", "down")])
    there = run(tmp_path / "b", [of("linear", "input", draw(2, HIDDEN))])
    names = parse_map('[[module]]\nleft = "*"\nright = "*"\n', "same")
    assert [one.text for one in aspects_of(here, here, names).found] == [
        "down.forward.input",
        "up.forward.input",
    ]
    text = "".join(f'[[module]]\nleft = "{name}"\nright = "linear"\n' for name in ("up", "down"))
    with pytest.raises(
        ConfigError, match=r"down and up of .* are both linear of .*; a module has one counterpart"
    ):
        aspects_of(here, there, parse_map(text, "twice"))


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
