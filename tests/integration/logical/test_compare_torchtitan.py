"""`capd compare --logical --map megatron-torchtitan`: Megatron on one rank, and the same weights in torchtitan's Llama.

CAPD_TEST_TORCHTITAN names the directories where torchtitan and what it needs lie (pip install --target), separated by
colons.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.jobs.captured import run_captured
from tests.kit.jobs.layouts import Layout, run_layout
from tests.kit.launching import directories_of, needs
from tests.kit.store.cli import run_capd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), needs("torchtitan")]
WHOLE = Layout(layers=2, groups=2, rows=2)
# Tests see none of capd's variables.
PACKAGES = directories_of("torchtitan")
RANKS = {"single": 1, "tp2": 2, "fsdp2": 2}
"""Way of `tests.kit.models.titan_layouts` → ranks."""


def run_titan(directory: Path, name: str, way: str, *arguments: str) -> Path:
    """Train torchtitan's model below `capd run`; returns the store."""
    return run_captured(
        directory, name, "tests.kit.models.titan_layouts", WHOLE.json(), way, *arguments,
        ranks=RANKS[way], PYTHONPATH=PACKAGES,
    )  # fmt: skip


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory with the runs of Megatron: `megatron` and `noise`."""
    with tempfile.TemporaryDirectory(prefix="capd-titan-") as name:
        directory = Path(name)
        run_layout(WHOLE, directory, "megatron")
        run_layout(WHOLE, directory, "noise", CAPD_PERTURB="1.2e-7")
        yield directory


def compared(place: Path, other: Path) -> tuple[int, dict[str, Any]]:
    done = run_capd(
        "compare", place / "megatron.zarr", other, "--logical", "--map", "megatron-torchtitan", "--noise",
        place / "noise.zarr", "--json",
    )  # fmt: skip
    assert done.code in (0, 1), done.err
    return done.code, done.json


@pytest.mark.parametrize("way", RANKS)
def test_megatron_agrees_with_torchtitan_tensor_by_tensor(place: Path, way: str) -> None:
    code, found = compared(place, run_titan(place, way, way))

    assert (code, found["beyond"]) == (0, 0), found["tensors"][:3]
    assert found["samples"]["rule"] == "content"
    assert (found["samples"]["pairs"], found["samples"]["unpaired"]) == (4, 0)
    assert found["left_out"] == {}
    tensors = {row["tensor"]: row for row in found["tensors"]}
    for layer in range(WHOLE.layers):
        at = f"decoder.layers.{layer}"
        for module, pieces in (
            ("self_attention.linear_qkv", ("[query]", "[key]", "[value]")), ("mlp.linear_fc1", ("[gate]", "[up]")),
            ("self_attention.linear_proj", ("",)), ("mlp.linear_fc2", ("",)),
        ):  # fmt: skip
            for piece in pieces:
                for tensor in (
                    "forward.weight",
                    "forward.output",
                    "backward.grad_output",
                    "backward.grad_weight",
                ):
                    assert f"{at}.{module}.{tensor}{piece}" in tensors
    weights = [row for name, row in tensors.items() if ".forward.weight" in name]
    assert len(weights) == WHOLE.layers * 7 + 1
    assert all(row["bit_equal"] == row["compared"] for row in weights)
    # Without names of attention in the map, its tensors have no counterpart.
    assert all(".core_attention." in name for name in found["only_reference"])


def test_a_conversion_that_forgets_the_rotary_pairs_is_named(place: Path) -> None:
    code, found = compared(place, run_titan(place, "wrong", "single", "wrong"))
    first = found["first_divergence"]
    assert code == 1
    assert first["tensor"] == "decoder.layers.0.self_attention.linear_qkv.forward.weight[query]"
    beyond = [row["tensor"] for row in found["tensors"] if row["beyond"] and ".weight" in row["tensor"]]
    assert {name.rpartition(".")[2] for name in beyond} == {"weight[query]", "weight[key]"}
