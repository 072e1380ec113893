"""`capd import` of the files of Megatron-LM's --save-activations, --save-dgrads and --save-wgrads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from capd.store.read.store import open_store
from tests.kit.store.cli import Result

Capd = Callable[..., Result]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two tensor-parallel ranks and two stages of two chunks, one layer each."""
    root = tmp_path / "saved"
    names = {
        "activations": ("decoder.layers.0.mlp.linear_fc1/input0", "decoder.layers.0.mlp.linear_fc1/output0"),
        "dgrads": ("decoder.layers.0.mlp.linear_fc1/input0",),
        "wgrads": ("decoder.layers.0.mlp.linear_fc1.weight",),
    }
    for kind, tensors in names.items():
        directory = root / kind / "iter_0000010"
        directory.mkdir(parents=True)
        for tp in (0, 1):
            for pp in (0, 1):
                chunks = {
                    f"model_chunk{chunk}": {
                        name: torch.full((2, 3), 100.0 * chunk + 10 * pp + tp, dtype=torch.bfloat16)
                        for name in tensors
                    }
                    for chunk in (0, 1)
                }
                torch.save(chunks, directory / f"mp_rank_{tp:02d}_{pp:03d}.pth")
    return root


def test_layers_and_ranks_are_those_of_the_whole_model(capd: Capd, saved: Path, tmp_path: Path) -> None:
    options = (
        "--pp",
        "2",
        "--vpp",
        "2",
        "--layers",
        "4",
        "--run-id",
        "old",
        "--store",
        tmp_path / "runs",
        "--json",
    )

    done = capd("import", saved, *options)

    assert (done.code, done.json["imported"], done.json["skipped"]) == (0, 32, [])
    store = open_store(tmp_path / "runs" / "old.zarr")
    [chunk1_of_stage1] = [
        one
        for one in store.series
        if one.key.layer == 3 and one.key.tensor_name == "output" and one.key.rank == 3
    ]
    assert chunk1_of_stage1.key.module == "decoder.layers.3.mlp.linear_fc1"
    assert chunk1_of_stage1.records[0].iteration == 10
    assert chunk1_of_stage1.torch(0)[0, 0] == 111
    assert chunk1_of_stage1.records[0].attributes["tp_rank"] == 1
    assert {one.key.layer for one in store.series} == {0, 1, 2, 3}
    assert {one.key.tensor_name for one in store.series} == {"input", "output", "grad_input", "grad_weight"}
    assert capd("import", saved, *options).json["already"] == 32


def test_a_pipeline_that_was_not_named_is_refused_in_words(capd: Capd, saved: Path, tmp_path: Path) -> None:
    done = capd("import", saved, "--store", tmp_path / "runs", "--run-id", "old")

    assert done.code == 1
    # Without --pp the second number is an expert's rank; the chunks still tell.
    assert "give --vpp 2" in done.err
    uneven = capd("import", saved, "--store", tmp_path / "runs", "--pp", "2", "--layers", "3")
    assert uneven.code == 2
    assert "evenly" in uneven.err


def test_a_foreign_value_is_named_and_the_rest_is_imported(capd: Capd, tmp_path: Path) -> None:
    directory = tmp_path / "saved" / "activations" / "iter_0000001"
    directory.mkdir(parents=True)
    chunk = {"embedding/output0": torch.ones(2), "embedding/input0": "tokens"}
    torch.save({"model_chunk0": chunk}, directory / "mp_rank_00.pth")
    torch.save([1], directory / "mp_rank_01.pth")

    done = capd("import", tmp_path / "saved", "--store", tmp_path / "runs", "--json")

    assert (done.code, done.json["imported"]) == (1, 1)
    assert [
        "no tensor" in one["reason"] or "dictionary" in one["reason"] for one in done.json["skipped"]
    ] == [True, True]
