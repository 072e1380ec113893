"""User names in paths: safe, injective, bounded."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.store.documents.names import component, series_path
from tests.kit.store.writing import key

hostile = st.text(max_size=200) | st.sampled_from(
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\nb",
        "zarr.json",
        "data",
        "c",
        "__x",
        ".capd",
        "A",
        "a",
        "é",
        "é",
        "x" * 4096,
    ]
)


@given(hostile)
def test_a_component_is_safe_on_any_file_system(name: str) -> None:
    encoded = component(name)
    assert re.fullmatch(r"[A-Za-z0-9_.~\-]{1,100}", encoded)
    assert not encoded.startswith((".", "__"))
    assert encoded not in {"zarr.json", "c", "data", "moments"}


@given(hostile, hostile)
def test_different_names_never_share_a_component(one: str, other: str) -> None:
    def folded(name: str) -> str:
        return unicodedata.normalize("NFKC", component(name)).casefold()

    assert (folded(one) == folded(other)) == (one == other)


@pytest.mark.parametrize("name", ["q_proj", "decoder.layers.0.mlp", "mxfp8", "a-b"])
def test_plain_names_stay_readable(name: str) -> None:
    assert component(name) == name


def test_the_path_follows_the_layout() -> None:
    path = series_path(
        key(module="h.0.attn.q", layer=3, operation="backward", tensor_name="grad_output", phase="pre")
    )
    assert path == "bf16/rank0/layer3/pre/h.0.attn.q.backward.grad_output"
    assert (
        series_path(key(layer=None, layer_type="x", component="y"))
        == "bf16/rank0/layerNA/pre/x.y.forward.input"
    )
