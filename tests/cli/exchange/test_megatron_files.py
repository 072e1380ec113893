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


@pytest.mark.parametrize(
    ("names", "options", "said"),
    [
        (["00_001"], [], "is the stage of a pipeline or the rank of an expert; give --pp N and --layers N"),
        (["00_001"], ["--ep", "1"], "is of a stage of a pipeline; give --pp N and --layers N"),
        (
            ["00_001"],
            ["--pp", "2", "--ep", "2", "--layers", "2"],
            "has 2 numbers, which contradicts --pp 2 and --ep 2",
        ),
        (["00_001"], ["--pp", "1", "--ep", "1"], "has 2 numbers, which contradicts --pp 1 and --ep 1"),
        (["00"], ["--pp", "2", "--layers", "2"], "has 1 number, which contradicts --pp 2"),
        (["00_001_001"], [], "is of a stage of a pipeline; give --pp N and --layers N"),
        (["00_001_001"], ["--pp", "1"], "has 3 numbers, which contradicts --pp 1"),
        (["00", "00_001"], ["--ep", "2"], "so they are of several jobs"),
        (["00_002"], ["--pp", "2", "--layers", "2"], "of rank 2 of the pipeline, which contradicts --pp 2"),
        (["00", "02"], [], "no file is of rank 1 of tensor parallelism; give --tp N"),
        (["04"], ["--tp", "4"], "of rank 4 of tensor parallelism, which contradicts --tp 4"),
        (["00_001"], ["--ep", "1", "--pp", "3", "--layers", "4"], "do not fill 3 stages of 1 chunks evenly"),
    ],
)
def test_names_that_can_be_read_in_two_ways_or_contradict_are_refused(
    capd: Capd, tmp_path: Path, names: list[str], options: list[str], said: str
) -> None:
    directory = tmp_path / "saved" / "activations" / "iter_0000001"
    directory.mkdir(parents=True)
    for name in names:
        torch.save({"model_chunk0": {}}, directory / f"mp_rank_{name}.pth")

    done = capd("import", tmp_path / "saved", "--store", tmp_path / "runs", *options)

    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not (tmp_path / "runs").exists()


def test_the_sizes_that_are_given_are_those_of_the_job(capd: Capd, tmp_path: Path) -> None:
    directory = tmp_path / "saved" / "wgrads" / "iter_0000001"
    directory.mkdir(parents=True)
    tensors = {"decoder.layers.0.mlp.router.weight": torch.ones(2)}
    torch.save({"model_chunk0": tensors}, directory / "mp_rank_01_001.pth")

    done = capd(
        "import",
        tmp_path / "saved",
        "--store",
        tmp_path / "runs",
        "--tp",
        "4",
        "--ep",
        "8",
        "--run-id",
        "one",
        "--json",
    )

    assert (done.code, done.json["imported"], done.json["files"]) == (0, 1, 1)
    [series] = open_store(tmp_path / "runs" / "one.zarr").series
    [record] = series.records
    expected = {"tp_rank": 1, "tp_size": 4, "pp_rank": 0, "pp_size": 1, "ep_rank": 1, "ep_size": 8}
    assert record.attributes == expected
    assert record.metadata["megatron_name"] == "decoder.layers.0.mlp.router.weight"
    assert series.key.rank == 5


def test_chunks_and_layers_that_contradict_the_options_are_named(
    capd: Capd, saved: Path, tmp_path: Path
) -> None:
    store = ("--store", tmp_path / "runs", "--json")

    without = capd("import", saved, *store, "--pp", "2", "--layers", "4", "--run-id", "a")
    assert (without.code, without.json["imported"]) == (1, 0)
    assert "give --vpp 2, and --layers" in without.err
    uneven = capd("import", saved, *store, "--pp", "2", "--layers", "3")
    assert uneven.code == 2
    assert "evenly" in uneven.err

    torch.save(
        {
            f"model_chunk{chunk}": {"decoder.layers.1.mlp.linear_fc1.weight": torch.ones(1)}
            for chunk in (0, 1)
        },
        saved / "wgrads" / "iter_0000010" / "mp_rank_00_000.pth",
    )
    beyond = capd("import", saved, *store, "--pp", "2", "--vpp", "2", "--layers", "4", "--run-id", "b")
    assert (beyond.code, len(beyond.json["skipped"])) == (1, 2)
    assert "layer 1 of a chunk" in beyond.json["skipped"][0]["reason"]


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
