"""The grammar of placements, and what the attributes of a record may say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.errors import ContradictoryParts
from capd.store.logical.identity import identity_of, logical_module
from capd.store.logical.layout import coordinates_of, layout_of
from capd.store.logical.placement import Placement, parse_placement
from capd_client.protocol.key import Key

GRAMMAR = {
    "R": Placement("R"),
    "S(0)": Placement("S", 0),
    "S(-1)": Placement("S", -1),
    "S(0):2": Placement("S", 0, blocks=2),
    "S(-2)*2": Placement("S", -2, copies=2),
    "S(-2)+4": Placement("S", -2, terms=4),
    "S(1):3*2": Placement("S", 1, blocks=3, copies=2),
    "P(sum)": Placement("P", reduction="sum"),
    "P(mean)": Placement("P", reduction="mean"),
    "Z(0)": Placement("Z", 0),
    "I(1)": Placement("I", 1),
    "QKV(0)": Placement("QKV", 0),
}


@pytest.mark.parametrize("text", GRAMMAR)
def test_every_form_of_the_grammar_is_read_and_written(text: str) -> None:
    assert parse_placement(text) == GRAMMAR[text]
    assert str(GRAMMAR[text]) == text


def test_dtensor_calls_a_mean_an_average() -> None:
    assert parse_placement("P(avg)") == GRAMMAR["P(mean)"]


@pytest.mark.parametrize(
    "text",
    ["", "S", "S()", "S(0", "S(0) ", " S(0)", "S(x)", "S(0.0)", "S(16)", "S(-17)", "S(0):0", "S(0):4097", "S(0):-1",
     "S(0)*0", "S(0)+0", "Z(0):2", "I(0)*2", "P(max)", "P", "QKV(0):2", "r", "S(0)S(0)", "S(٣)", "S(0)\n", "S(1e3)",
     "S(99999999999)", "_S(0, 2)", None, 0, 1.0, float("nan"), True, ["S(0)"], {"S": 0}, "S(0)" * 100_000],
)  # fmt: skip
def test_what_is_no_placement_is_refused_in_short_words(text: Any) -> None:
    with pytest.raises(ContradictoryParts, match="placement") as found:
        parse_placement(text)
    assert len(str(found.value)) < 400


def test_the_layout_has_the_order_of_the_mesh_and_the_rank_s_place() -> None:
    attributes = {
        "mesh": ["tp", "dp"], "dp_placement": "S(0)", "dp_rank": 1, "dp_size": 3, "tp_placement": "S(1)",
        "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1,
    }  # fmt: skip
    layout = layout_of(attributes)
    assert [d.name for d in layout.dimensions] == ["tp", "dp"]
    assert layout.place == (0, 1)
    assert not layout.is_whole
    assert not layout.reduces
    assert coordinates_of(attributes) == {"dp": (1, 3), "tp": (0, 2), "pp": (0, 1)}


def test_without_a_mesh_context_parallelism_splits_first() -> None:
    attributes = {f"{n}_{end}": v for n in ("tp", "cp", "a") for end, v in
                  (("placement", "S(0)"), ("rank", 0), ("size", 2))}  # fmt: skip
    assert [d.name for d in layout_of(attributes).dimensions] == ["cp", "a", "tp"]


def test_the_order_of_a_split_may_be_said_by_itself() -> None:
    own = {"cp_placement": "S(0)", "cp_rank": 0, "cp_size": 2}
    assert layout_of({**own, "cp_order": "zigzag"}).dimensions[0].placement == Placement("Z", 0)
    assert layout_of({**own, "cp_order": "contiguous"}).dimensions[0].placement == Placement("S", 0)
    indexed = layout_of({**own, "cp_order": "index", "cp_index": [3, 1]}).dimensions[0]
    assert indexed.placement == Placement("I", 0)
    assert indexed.held == (3, 1)


WHOLE = {"tp_placement": "S(0)", "tp_rank": 0, "tp_size": 2}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 10**6}, "at most 131072 ranks"),
    ({"tp_size": 10**400}, "at most 131072 ranks"),
    ({"tp_size": -2}, "tp_size -2"),
    ({"tp_size": 0}, "not below"),
    ({"tp_rank": 2}, "not below"),
    ({"tp_rank": -1}, "tp_rank is -1"),
    ({"tp_rank": True}, "tp_rank is True"),
    ({"tp_rank": 0.0}, "tp_rank is 0.0"),
    ({"tp_size": float("nan")}, "nan"),
    ({"tp_size": "2"}, "'2'"),
    ({"tp_size": None}, "None"),
    ({"tp_placement": "S(0)*3"}, "cannot be divided"),
    ({"tp_placement": "S(0)+2", "tp_size": 3}, "cannot be divided"),
    ({"tp_placement": "T(0)"}, "tp_placement: unknown placement 'T\\(0\\)'"),
    ({"mesh": "tp"}, "mesh is 'tp'"),
    ({"mesh": [1]}, "mesh is"),
    ({"mesh": ["tp", "tp"]}, "twice"),
    ({"tp_order": "sideways"}, "tp_order is 'sideways'"),
    ({"tp_order": 3}, "tp_order is 3"),
    ({"tp_placement": "Z(0)", "tp_order": "contiguous"}, "contradict"),
    ({"tp_placement": "S(0):2", "tp_order": "zigzag"}, "contradict"),
    ({"tp_placement": "I(0)"}, "tp_index is None"),
    ({"tp_placement": "I(0)", "tp_index": [0, -1]}, "no position"),
    ({"tp_placement": "I(0)", "tp_index": [0, 0.5]}, "no position"),
    ({"tp_placement": "I(0)", "tp_index": [2**63]}, "no position"),
    ({"tp_placement": "Z(0)", "cu_seqlens": "0,4"}, "cu_seqlens"),
    ({"tp_placement": "Z(0)", "cu_seqlens": [0, 8, 4]}, "does not grow"),
    ({"tp_placement": "QKV(0)"}, "qkv_heads None"),
    ({"tp_placement": "QKV(0)", "qkv_heads": 4, "qkv_groups": 0, "qkv_head_dim": 2}, "qkv_groups 0"),
    ({"tp_placement": "QKV(0)", "qkv_heads": 3, "qkv_groups": 2, "qkv_head_dim": 2}, "cannot be divided"),
    ({"tp_placement": "QKV(0)", "qkv_heads": 2**70, "qkv_groups": 1, "qkv_head_dim": 2}, "heads"),
    ({"true_sizes": 7}, "true_sizes is 7"),
    ({"true_sizes": [[0]]}, "true_sizes has"),
    ({"true_sizes": [[0, -5]]}, "true_sizes has"),
    ({"true_sizes": [["0", 5]]}, "true_sizes has"),
    ({"true_sizes": [[0, float("nan")]]}, "true_sizes has"),
    ({"a_placement": "R", "a_rank": 0, "a_size": 100_000}, "ranks together"),
]


@pytest.mark.parametrize(("changes", "said"), HOSTILE, ids=str)
def test_attributes_that_are_not_sound_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ContradictoryParts, match=said) as found:
        layout_of({**WHOLE, **changes})
    assert len(str(found.value)) < 500


def test_an_expert_is_named_by_its_number_over_all_ranks() -> None:
    local = "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1"
    assert logical_module(local, {"expert": 5}) == "decoder.layers.3.mlp.experts.5.linear_fc1"
    assert logical_module("local_experts.0", {"expert": 2}) == "experts.2"
    assert logical_module(local, {}) == local
    for wrong in (-1, "5", 5.0, True):
        with pytest.raises(ContradictoryParts, match="expert is"):
            logical_module(local, {"expert": wrong})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([*GRAMMAR, "zigzag", "tp", "cp", 2, 4]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip
NAMES = [f"{name}_{end}" for name in ("tp", "cp") for end in ("placement", "rank", "size", "order", "index")]


@given(
    st.dictionaries(
        st.sampled_from([*NAMES, "mesh", "cu_seqlens", "true_sizes", "qkv_heads", "batch_dims", "expert"]),
        JSON,
    )
)
def test_any_attributes_are_a_sound_layout_or_refused(attributes: dict[str, Any]) -> None:
    """A store may come from anybody."""
    key = Key(quant_type="bf16", rank=0, tensor_name="input", module="experts.local_experts.0")
    try:
        layout = layout_of(attributes)
        identity = identity_of(key, "float32", attributes)
    except ContradictoryParts:
        return
    assert all(0 <= part < one.parts for part, one in zip(layout.place, layout.dimensions, strict=True))
    assert identity.key.rank == 0
