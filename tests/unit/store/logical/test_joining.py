"""Parts that were dealt out by a rule of their own are put together again, bit for bit."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from capd.errors import ContradictoryParts
from capd.store.logical.joining import ShapedPart, absent_places, join_plan, joined, part_of
from capd.store.logical.layout import layout_of
from capd.store.logical.positions import QkvHeads

Array = NDArray[Any]
Sizes = dict[str, int]
HEADS = {"qkv_heads": 8, "qkv_groups": 2, "qkv_head_dim": 3}


def dealt(whole: Array, placement: str, rank: int, size: int, more: dict[str, Any]) -> Array:
    """What a rank holds, cut by hand."""
    axis = (
        int(placement.partition("(")[2].partition(")")[0]) if "(" in placement and placement[0] != "P" else 0
    )
    kind = placement.partition("(")[0]
    if kind in ("R", "P"):
        return whole
    if kind == "Z":
        chunks = np.array_split(whole, 2 * size, axis)
        return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]], axis)
    if kind == "I":
        return np.take(whole, more["of"][rank], axis)
    if kind == "QKV":
        heads, groups, dim = (HEADS[f"qkv_{name}"] for name in ("heads", "groups", "head_dim"))
        cuts = np.cumsum([heads * dim, groups * dim])
        query, key, value = np.split(whole, cuts, axis)
        shared = max(1, size // groups)
        return np.concatenate(
            [np.split(query, size, axis)[rank]]
            + [np.split(part, max(1, size // shared), axis)[rank // shared] for part in (key, value)],
            axis,
        )
    _, _, blocks = placement.partition(":")
    shared = int(placement.rpartition("*")[2]) if "*" in placement else 1
    count = int(blocks.partition("*")[0] or 1)
    each = [
        np.array_split(block, size // shared, axis)[rank // shared] for block in np.split(whole, count, axis)
    ]
    return np.concatenate(each, axis)


def parts_of(
    whole: Array, placements: dict[str, str], sizes: Sizes, **more: Any
) -> dict[tuple[int, ...], tuple[ShapedPart, Array]]:
    """The parts of all ranks by their place; the first dimension splits first."""
    found: dict[tuple[int, ...], tuple[ShapedPart, Array]] = {}
    for ranks in product(*(range(sizes[name]) for name in placements)):
        part, attributes = whole, {"mesh": list(placements), **HEADS, **more}
        for (name, placement), rank in zip(placements.items(), ranks, strict=True):
            part = dealt(part, placement, rank, sizes[name], more)
            attributes |= {f"{name}_placement": placement, f"{name}_rank": rank, f"{name}_size": sizes[name]}
            if placement.startswith("I"):
                attributes[f"{name}_index"] = [int(at) for at in more["of"][rank]]
        layout = layout_of(attributes)
        found.setdefault(layout.place, (ShapedPart(f"part {ranks}", layout, part.shape), part))
    return found


def assert_joins(whole: Array, placements: dict[str, str], sizes: Sizes, **more: Any) -> None:
    parts = parts_of(whole, placements, sizes, **more)
    plan = join_plan({place: part for place, (part, _) in parts.items()})
    assert plan.shape == whole.shape
    result = joined(plan, lambda place: parts[place][1], whole.dtype)
    assert result.dtype == whole.dtype
    np.testing.assert_array_equal(result, whole)
    for place, (_, part) in parts.items():
        np.testing.assert_array_equal(part_of(whole, plan.segments[place], part), part)


WHOLE = np.arange(24 * 16 * 6, dtype=np.uint16).reshape(24, 16, 6)
TABLE: list[tuple[dict[str, str], Sizes]] = [
    ({}, {}),
    ({"tp": "R"}, {"tp": 3}),
    ({"tp": "S(0)"}, {"tp": 4}),
    ({"tp": "S(-1)"}, {"tp": 2}),
    ({"tp": "S(1)"}, {"tp": 3}),  # 6, 5, 5
    ({"tp": "S(0)"}, {"tp": 32}),  # 8 empty parts
    ({"tp": "S(0):2"}, {"tp": 4}),
    ({"tp": "S(-2):4"}, {"tp": 2}),
    ({"tp": "S(-2)*2"}, {"tp": 4}),
    ({"tp": "S(0):2*2"}, {"tp": 4}),
    ({"cp": "Z(0)"}, {"cp": 1}),
    ({"cp": "Z(0)"}, {"cp": 4}),
    ({"cp": "Z(0)", "tp": "S(0)"}, {"cp": 2, "tp": 3}),
    ({"cp": "Z(0)", "tp": "S(-1)"}, {"cp": 3, "tp": 2}),
    ({"cp": "Z(0)", "tp": "S(1):2"}, {"cp": 2, "tp": 2}),
    ({"tp": "S(0)", "dp": "S(0)"}, {"tp": 2, "dp": 5}),  # uneven inside
    ({"tp": "S(0)", "dp": "S(0)"}, {"tp": 2, "dp": 13}),  # empty parts inside
    ({"dp": "R", "tp": "S(0)", "cp": "R"}, {"dp": 2, "tp": 2, "cp": 2}),
    ({"a": "S(0)", "b": "S(1)", "c": "S(2)"}, {"a": 2, "b": 2, "c": 2}),
    ({"a": "S(0)", "b": "S(0):2", "c": "Z(0)"}, {"a": 2, "b": 2, "c": 3}),
]


@pytest.mark.parametrize(("placements", "sizes"), TABLE, ids=str)
def test_every_placement_puts_parts_where_they_were_cut(placements: dict[str, str], sizes: Sizes) -> None:
    assert_joins(WHOLE, placements, sizes)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_fused_projection_has_keys_and_values_on_several_ranks(size: int) -> None:
    assert_joins(np.arange(36.0).reshape(36, 1), {"tp": "QKV(0)"}, {"tp": size})
    assert_joins(np.arange(144.0).reshape(4, 36), {"cp": "Z(0)", "tp": "QKV(1)"}, {"cp": 2, "tp": size})


def test_a_listed_split_says_its_positions() -> None:
    of = [np.array([5, 0, 7]), np.array([1, 2]), np.array([6, 3, 4])]
    assert_joins(np.arange(32).reshape(8, 4), {"cp": "I(0)"}, {"cp": 3}, of=of)


def test_many_scattered_positions_are_written_at_once() -> None:
    rng = np.random.default_rng(0)
    of = np.array_split(rng.permutation(10_000), 2)
    assert_joins(rng.standard_normal((10_000, 3)), {"cp": "I(0)", "tp": "S(1)"}, {"cp": 2, "tp": 3}, of=of)


def test_documents_are_dealt_out_one_by_one() -> None:
    whole, ends, size = np.arange(24), [0, 8, 8, 20, 24], 2
    parts = {}
    for rank in range(size):
        held = []
        for begin, end in ((0, 8), (8, 20), (20, 24)):
            chunks = np.split(whole[begin:end], 2 * size)
            held += [chunks[rank], chunks[2 * size - 1 - rank]]
        layout = layout_of({"cp_placement": "Z(0)", "cp_rank": rank, "cp_size": size, "cu_seqlens": ends})
        parts[(rank,)] = ShapedPart(str(rank), layout, (12,)), np.concatenate(held)
    plan = join_plan({place: part for place, (part, _) in parts.items()})
    np.testing.assert_array_equal(joined(plan, lambda place: parts[place][1], whole.dtype), whole)


def test_zigzag_is_the_order_that_was_measured_on_megatron_and_torch() -> None:
    """16 tokens on 4 ranks: 0 1 14 15 | 2 3 12 13 | 4 5 10 11 | 6 7 8 9."""
    parts = parts_of(np.arange(16), {"cp": "Z(0)"}, {"cp": 4})
    plan = join_plan({place: part for place, (part, _) in parts.items()})
    held = [
        [at for one in plan.segments[(rank,)][0] for at in range(one.start, one.start + one.length)]
        for rank in range(4)
    ]
    assert held == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_sums_are_added_in_float64_and_rounded_once() -> None:
    rng = np.random.default_rng(1)
    terms = rng.standard_normal((8, 5, 7)).astype(np.float32)
    parts = {}
    for rank in range(8):
        layout = layout_of({"tp_placement": "P(sum)", "tp_rank": rank, "tp_size": 8})
        parts[(rank,)] = ShapedPart(str(rank), layout, (5, 7))
    plan = join_plan(parts)
    found = joined(plan, lambda place: terms[place[0]], np.dtype(np.float32))
    np.testing.assert_array_equal(found, terms.astype(np.float64).sum(0).astype(np.float32))


def test_means_and_sums_over_splits_and_integers() -> None:
    terms = np.arange(2 * 3 * 8, dtype=np.int64).reshape(2, 3, 8)
    for reduction, expected in (("sum", terms.sum(0)), ("mean", terms.mean(0))):
        parts = {}
        for a, b in product(range(2), range(4)):
            attributes = {"mesh": ["a", "b"], "a_placement": f"P({reduction})", "a_rank": a, "a_size": 2,
                          "b_placement": "S(1)", "b_rank": b, "b_size": 4}  # fmt: skip
            parts[a, b] = ShapedPart("", layout_of(attributes), (3, 2))
        plan = join_plan(parts)
        dtype = terms.dtype if reduction == "sum" else np.dtype(np.float64)
        found = joined(plan, lambda at: terms[at[0], :, 2 * at[1] : 2 * at[1] + 2].astype(dtype), dtype)  # noqa: B023
        np.testing.assert_array_equal(found, expected)


def test_terms_of_a_part_on_consecutive_ranks_are_added_and_parts_joined() -> None:
    """The gradient of keys if there are two groups on four ranks."""
    terms = np.arange(4.0 * 3).reshape(4, 3)
    parts = {}
    for rank in range(4):
        layout = layout_of({"tp_placement": "S(0)+2", "tp_rank": rank, "tp_size": 4})
        parts[(rank,)] = ShapedPart(str(rank), layout, (3,))
    found = joined(join_plan(parts), lambda place: terms[place[0]], np.dtype(np.float64))
    np.testing.assert_array_equal(found, np.concatenate([terms[0] + terms[1], terms[2] + terms[3]]))


def test_a_padded_vocabulary_is_cropped() -> None:
    whole = np.arange(12).reshape(6, 2)
    for true in (0, 1, 3, 4, 6):
        parts = parts_of(whole, {"tp": "S(0)"}, {"tp": 2}, true_sizes=[[0, true]])
        plan = join_plan({place: part for place, (part, _) in parts.items()})
        np.testing.assert_array_equal(joined(plan, lambda at: parts[at][1], whole.dtype), whole[:true])  # noqa: B023


def test_a_tensor_without_axes_is_one_element() -> None:
    assert_joins(np.array(3.5), {"tp": "R"}, {"tp": 2})


@given(st.data())
def test_any_nesting_of_splits_is_put_together(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 4, 12, 24]), min_size=1, max_size=3)))
    whole = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    placements: dict[str, str] = {}
    sizes: Sizes = {}
    for name in "abc"[: data.draw(st.integers(0, 3))]:
        axis, size = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 3))
        placements[name], sizes[name] = data.draw(st.sampled_from(["R", f"S({axis})"])), size
    assert_joins(whole, placements, sizes)


def shaped(
    shape: Sequence[int], rank: int, placement: str = "S(0)", size: int = 2, **more: Any
) -> ShapedPart:
    attributes = {"tp_placement": placement, "tp_rank": rank, "tp_size": size, **more}
    return ShapedPart(f"part {rank}", layout_of(attributes), tuple(shape))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (shaped((4, 3), 0), shaped((4, 2), 1), r"part 1 has length 2 along axis 1, and part 0 3"),
        (shaped((4, 3), 0), shaped((4,), 1), r"part 1 has shape \[4\], and part 0 \[4, 3\]"),
        (shaped((4, 3), 0), shaped((4, 3), 1, "S(1)"), r"part 1 is placed as tp S\(1\) of 2, and part 0 as tp S\(0\)"),
        (shaped((4, 3), 0), shaped((4, 3), 1, true_sizes=[[0, 3]]), "placed as"),
        (shaped((4, 3), 0, "S(2)"), shaped((4, 3), 1, "S(2)"), "tp_placement splits axis 2"),
        (shaped((4, 3), 0, "S(0):3"), shaped((4, 3), 1, "S(0):3"), "cannot be cut into 3 blocks"),
        (shaped((4, 3), 0, "Z(0)"), shaped((2, 3), 1, "Z(0)"), "zigzag needs parts of one even length"),
        (shaped((3, 3), 0, "Z(0)"), shaped((3, 3), 1, "Z(0)"), "zigzag needs parts of one even length"),
        (shaped((4, 3), 0, "P(sum)"), shaped((5, 3), 1, "P(sum)"), "no placement splits that axis"),
        (shaped((4, 3), 0, "S(0)+2"), shaped((5, 3), 1, "S(0)+2"), "terms of a sum have lengths 4 and 5"),
        (shaped((4, 3), 0, true_sizes=[[0, 9]]), shaped((4, 3), 1, true_sizes=[[0, 9]]), "true_sizes says 9"),
        (shaped((4, 3), 0, true_sizes=[[5, 9]]), shaped((4, 3), 1, true_sizes=[[5, 9]]), "true_sizes splits axis 5"),
        (shaped((2,), 0, "I(0)", tp_index=[0, 1]), shaped((2,), 1, "I(0)", tp_index=[1, 2]), "positions once"),
        (shaped((2,), 0, "I(0)", tp_index=[0, 1]), shaped((2,), 1, "I(0)", tp_index=[2]), "its index 1 positions"),
        (shaped((4,), 0, "Z(0)", cu_seqlens=[0, 6, 8]), shaped((4,), 1, "Z(0)", cu_seqlens=[0, 6, 8]), "6 cannot"),
        (shaped((4,), 0, "Z(0)", cu_seqlens=[0, 4]), shaped((4,), 1, "Z(0)", cu_seqlens=[0, 4]), "8 positions"),
        (shaped((3,), 0, "Z(0)", cu_seqlens=[0, 8]), shaped((5,), 1, "Z(0)", cu_seqlens=[0, 8]), "parts of one length"),
        (shaped((9, 1), 0, "QKV(0)", **HEADS), shaped((9, 1), 1, "QKV(0)", **HEADS), "should have 18 rows"),
        (shaped((2**45, 1), 0), shaped((2**45, 1), 1), "would have shape"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_by_name(first: ShapedPart, second: ShapedPart, said: str) -> None:
    with pytest.raises(ContradictoryParts, match=said):
        join_plan({(0,): first, (1,): second})


def test_absent_places_are_counted_and_the_first_ones_named() -> None:
    layout = shaped((1,), 0, size=100_000).layout
    count, named = absent_places(layout, {(0,), (2,)})
    assert count == 99_998
    assert named[:2] == [(1,), (3,)]
    assert len(named) == 16


def test_the_rows_of_a_fused_projection_are_cut_by_groups() -> None:
    """q0 q1 k0 v0 | q2 q3 k1 v1, of size 2."""
    query, key, value = QkvHeads(heads=4, groups=2, size=2).fused_rows()
    assert query.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert key.tolist() == [4, 5, 12, 13]
    assert value.tolist() == [6, 7, 14, 15]


@pytest.mark.parametrize("placement", ["S(0)", "S(1):2", "Z(0)", "P(sum)"])
def test_in_memory_are_the_whole_and_one_part(placement: str) -> None:
    """And the sum in float64, if parts are added up."""
    ranks, shape = 16, (256, 4096)
    parts = {(rank,): shaped(shape, rank, placement, ranks) for rank in range(ranks)}
    part_nbytes = 4 * shape[0] * shape[1]
    adds = placement == "P(sum)"
    whole_nbytes = part_nbytes * (1 if adds else ranks)

    def read(place: tuple[int, ...]) -> Array:
        return np.full(shape, place[0], np.float32)

    plan = join_plan(parts)
    tracemalloc.start()
    try:
        found = joined(plan, read, np.dtype(np.float32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.nbytes == whole_nbytes
    assert peak < whole_nbytes + (2 if adds else 0) * whole_nbytes + part_nbytes + (1 << 20)
