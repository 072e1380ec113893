"""`capd compare --logical --map megatron-hf`: Megatron on two ranks, and the same weights in Hugging Face's model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.jobs.captured import run_captured
from tests.kit.jobs.layouts import Layout, run_layout
from tests.kit.store.cli import run_capd

pytestmark = pytest.mark.timeout(400)
WHOLE = Layout(layers=2, groups=2, rows=2)
SHARDED = Layout(layers=2, groups=2, rows=2, tp=2, sp=True, ranks=2)


def run_llama(directory: Path, name: str, *arguments: str, **settings: str) -> Path:
    """Train the Hugging Face model below `capd run`; returns the store."""
    return run_captured(
        directory, name, "tests.kit.models.llama_layouts", WHOLE.json(), *arguments, **settings
    )


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory with the runs of Hugging Face (`hf`, `noise`) and of Megatron (`megatron`)."""
    with tempfile.TemporaryDirectory(prefix="capd-frameworks-") as name:
        directory = Path(name)
        run_llama(directory, "hf")
        run_llama(directory, "noise", CAPD_PERTURB="1.2e-7")
        run_layout(SHARDED, directory, "megatron")
        yield directory


def test_megatron_agrees_with_hugging_face_tensor_by_tensor(place: Path) -> None:
    done = run_capd(
        "compare", place / "hf.zarr", place / "megatron.zarr", "--logical", "--map", "megatron-hf",
        "--noise", place / "noise.zarr", "--json",
    )  # fmt: skip
    found = done.json
    assert (done.code, found["beyond"]) == (0, 0), found["tensors"][:3]
    assert (found["samples"]["pairs"], found["samples"]["unpaired"]) == (4, 0)
    tensors = {row["tensor"] for row in found["tensors"]}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        for tensor in ("forward.weight", "forward.output", "backward.grad_output", "backward.grad_weight"):
            assert any(one.startswith(f"model.layers.1.{name}.{tensor}") for one in tensors), (name, tensor)
    # Without names of attention in the map, its tensors have no counterpart.
    assert all(".core_attention." in name for name in found["only_other"])
    weights = [row for row in found["tensors"] if ".forward.weight" in row["tensor"]]
    assert len(weights) == 2 * 7 + 1
    assert all(row["bit_equal"] == row["compared"] for row in weights)


@pytest.mark.slow
def test_either_run_may_be_the_reference(place: Path) -> None:
    done = run_capd(
        "compare", place / "megatron.zarr", place / "hf.zarr", "--logical", "--map", "megatron-hf", "--json"
    )
    found = done.json
    assert found["guessed_limits"] is True
    tensors = {row["tensor"]: row for row in found["tensors"]}
    keys = tensors["decoder.layers.1.self_attention.linear_qkv.forward.weight[key]"]
    assert keys["other_tensors"] == ["model.layers.1.self_attn.k_proj.forward.weight"]
    assert keys["error"] == 0.0
    assert max(row["error"] for row in found["tensors"]) < 1e-5


@pytest.mark.slow
def test_a_wrong_conversion_is_named(place: Path) -> None:
    other = run_llama(place, "swapped", "k_proj")
    done = run_capd(
        "compare",
        place / "megatron.zarr",
        other,
        "--logical",
        "--map",
        "megatron-hf",
        "--first-divergence",
        "--json",
    )
    first = done.json["first_divergence"]
    assert done.code == 1
    assert first["tensor"] == "decoder.layers.1.self_attention.linear_qkv.forward.weight[key]"
