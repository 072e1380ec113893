"""What the records of an attention call say about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from capd_client.integrations.attention_facts import of_core, of_core_call, of_sdpa, of_transformers

QUERY, KEY = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 12, 16)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ("no_mask", None, 0.25, 0.0)),
        ({"is_causal": True}, ("causal", None, 0.25, 0.0)),
        ({"scale": 2, "dropout_p": 0.5}, ("no_mask", None, 2.0, 0.5)),
        ({"attn_mask": torch.ones(8, 12)}, ("arbitrary", [8, 12], 0.25, 0.0)),
    ],
)
def test_sdpa_tells_its_arguments(arguments: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = of_sdpa((QUERY, KEY, KEY), arguments)
    names = ("attn_mask_type", "attention_mask_shape", "softmax_scale", "attention_dropout")
    assert found == dict(zip(names, expected, strict=True))
    assert of_sdpa((), {"query": QUERY, "key": KEY, "value": KEY, **arguments}) == found


@pytest.mark.parametrize(
    ("function", "mask", "arguments", "kind"),
    [
        ("sdpa_attention_forward", None, {}, "causal"),
        ("sdpa_attention_forward", None, {"is_causal": False}, "no_mask"),
        ("sdpa_attention_forward", torch.ones(1, 1, 8, 12), {}, "arbitrary"),
        # What others do without a mask is theirs to know.
        ("flex_attention_forward", None, {}, None),
        ("eager_attention_forward", None, {"is_causal": True}, None),
        ("eager_attention_forward", None, {"is_causal": False}, "no_mask"),
        # It is aligned at the last token, and position ids of one row may be those of packed sequences.
        ("flash_attention_forward", None, {}, "causal_bottom_right"),
        ("flash_attention_forward", None, {"position_ids": torch.arange(8)[None]}, "causal_bottom_right"),
        ("flash_attention_forward", None, {"cu_seq_lens_q": torch.tensor([0, 8])}, None),
    ],
)
def test_transformers_tell_what_their_function_does(
    function: str, mask: Any, arguments: Any, kind: Any
) -> None:
    module = SimpleNamespace(is_causal=True)
    named = SimpleNamespace(__name__=function)
    found = of_transformers(
        (named, module, QUERY, KEY, KEY, mask), {"scaling": 0.1, "dropout": 0.2, **arguments}
    )
    assert found.get("attn_mask_type") == kind
    assert (found["softmax_scale"], found["attention_dropout"]) == (0.1, 0.2)


def test_packed_sequences_of_one_row_have_no_known_mask() -> None:
    named = SimpleNamespace(__name__="flash_attention_forward")
    call = (named, SimpleNamespace(is_causal=True), QUERY[:1], KEY[:1], KEY[:1], None)
    assert "attn_mask_type" not in of_transformers(call, {"position_ids": torch.tensor([[0, 1, 2, 3] * 2])})


@pytest.mark.parametrize(("window", "variant"), [(4, ["sliding_window"]), (12, None), (None, None)])
def test_a_window_over_all_keys_changes_nothing(window: int | None, variant: list[str] | None) -> None:
    named = SimpleNamespace(__name__="eager")
    arguments = {"sliding_window": window, "softcap": None}
    found = of_transformers((named, SimpleNamespace(), QUERY, KEY, KEY, None), arguments)
    assert found.get("attention_variant") == variant


def test_a_core_attention_tells_what_its_calls_share() -> None:
    core: Any = nn.Module()
    core.config = SimpleNamespace(attention_dropout=0.3, softmax_type="off-by-one")
    core.softmax_scale, core.attention_dropout = 0.125, nn.Dropout(0.1)
    # The softmax multiplies by the layer's number, by which the scale was divided.
    core.scale_mask_softmax = SimpleNamespace(scale=2, window_size=(64, 0))
    assert of_core(core) == {
        "softmax_scale": 0.25, "attention_dropout": 0.1, "attention_variant": ["sliding_window", "sinks"],
    }  # fmt: skip
    core.scale_mask_softmax = SimpleNamespace(scale=None, window_size=(-1, 0))
    core.config.softmax_type = "vanilla"
    assert of_core(core) == {"softmax_scale": 0.125, "attention_dropout": 0.1}
    assert of_core(nn.Identity()) == {}
    core.softmax_type = "learnable"
    assert of_core(core)["attention_variant"] == ["sinks"]


@pytest.mark.parametrize(
    ("given", "variant"),
    [
        ({"core_attention_bias_type": "no_bias", "window_size": (-1, 0)}, None),
        ({"core_attention_bias_type": "alibi"}, ["sinks", "position_bias"]),
        ({"core_attention_bias": torch.zeros(1)}, ["sinks", "position_bias"]),
        (
            {"attention_bias": torch.zeros(1), "window_size": (4, 0)},
            ["sinks", "sliding_window", "position_bias"],
        ),
    ],
)
def test_a_call_of_a_core_attention_tells_its_own_bias_and_window(
    given: dict[str, Any], variant: list[str] | None
) -> None:
    known = {"softmax_scale": 0.5, "attention_variant": ["sinks"]}
    found = of_core_call({"attention_mask": QUERY, **given}, "causal", known)
    assert found == {
        "attention_mask_shape": [2, 4, 8, 16], "attn_mask_type": "causal", "softmax_scale": 0.5,
        "attention_variant": variant or ["sinks"],
    }  # fmt: skip
    assert known["attention_variant"] == ["sinks"]
    assert of_core_call({"attn_mask_type": "no_mask"}, "causal", {})["attn_mask_type"] == "no_mask"
