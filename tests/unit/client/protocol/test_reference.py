"""References of records: every key and moment comes back as it was, and no other text is taken for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd_client.errors import ConfigError
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.reference import parse_reference, reference_of

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
indices = st.integers(0, 2**63 - 1)
keys = st.builds(
    Key, quant_type=names, rank=st.integers(0, 2**31 - 1), tensor_name=names,
    layer=st.none() | indices, phase=names, layer_type=names, operation=names, component=names, module=names,
    stack=names,
)  # fmt: skip
moments = st.builds(
    Moment, iteration=indices, micro_batch=indices, call=indices, sample_idx=st.none() | indices,
    batch_idx=st.none() | indices, sequence_idx=st.none() | indices, attempt=indices,
)  # fmt: skip


@given(keys, moments)
def test_a_reference_holds_key_and_moment(key: Key, moment: Moment) -> None:
    text = reference_of(key, moment)
    fields, when = parse_reference(text)

    assert fields == msgspec.structs.asdict(key)
    for name in ("iteration", "micro_batch", "call", "attempt"):
        assert when[name] == getattr(moment, name)
    for name in ("sample_idx", "batch_idx", "sequence_idx"):
        assert when.get(name) == getattr(moment, name)
    assert "/" not in text


@pytest.mark.parametrize(
    "text",
    [
        "", "capd:", "capd:x", "capd:quant_type=bf16", "file.pt", "capd:quant_type=a&rank=x&tensor_name=t",
        "capd:quant_type=a&rank=0&tensor_name=t&other=1", "capd:quant_type=a&rank=0&rank=1&tensor_name=t",
        "capd:quant_type=a&rank=0&tensor_name=t" + "&call=1" * 100, "capd:" + "x" * 200_000,
        "capd:quant_type=a&tensor_name=t&rank=" + "9" * 5000,
    ],
)  # fmt: skip
def test_any_other_text_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="no reference"):
        parse_reference(text)


def test_half_a_character_in_a_name_is_no_obstacle() -> None:
    assert parse_reference(reference_of(Key(quant_type="a", rank=0, tensor_name="\ud800"), Moment()))
