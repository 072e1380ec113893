"""What the records of an attention call say about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from capd_client.integrations.attention_facts import of_core, of_sdpa, of_transformers

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
