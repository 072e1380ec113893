"""`capd export --to sglang` and `capd import` of the dumper's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from tests.kit.exchange.layouts import UNRELATED, laid_out_run
from tests.kit.exchange.sharded import sharded_run, whole
from tests.kit.store.cli import Result, StoreWriter, linear_key

Capd = Callable[..., Result]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharded_run(tmp_path_factory.mktemp("captures"), "exp")


def test_a_file_has_the_tensor_and_says_how_it_is_split(capd: Capd, run: Path, tmp_path: Path) -> None:
    assert capd("export", run, "--to", "sglang", "-o", tmp_path).code == 0

    [path] = (tmp_path / "exp").glob("*rank=1___*weight*.pt")
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["value"], torch.from_numpy(whole("weight")[4:]))
    assert found["meta"]["dims"] == "d0[tp] d1"
    assert found["meta"]["megatron_parallel_info"] == {"tp_rank": 1, "tp_size": 2}
    dims = {p.name.split("name=")[1].split("___")[0]: torch.load(p, weights_only=True)["meta"]["dims"]
            for p in (tmp_path / "exp").glob("*rank=0___*.pt")}  # fmt: skip
    assert dims == {
        "blocks.blocks.0.mlp.fc1.forward.weight": "d0[tp] d1",
        "blocks.blocks.0.mlp.fc1.forward.input": "s d1 # tp:replicated",
        "blocks.blocks.0.mlp.fc1.forward.output": "s d1[tp]",
        "blocks.blocks.0.mlp.fc1.backward.grad_input": "s[tp:partial] d1",
    }


def test_what_was_exported_becomes_the_same_records_again(capd: Capd, run: Path, tmp_path: Path) -> None:
    capd("export", run, "--to", "sglang", "-o", tmp_path / "out")

    done = capd("import", tmp_path / "out", "--store", tmp_path / "again", "--run-id", "exp", "--json")

    assert (done.code, done.json["imported"], done.json["skipped"]) == (0, 8, [])
    before, after = open_store(run).series, open_store(tmp_path / "again" / "exp.zarr").series
    assert [one.key for one in after] == [one.key for one in before]
    for one, other in zip(before, after, strict=True):
        assert one.numpy(0).tobytes() == other.numpy(0).tobytes()
        assert one.records[0].attributes == other.records[0].attributes
        assert one.records[0].metadata == other.records[0].metadata
        assert (one.records[0].iteration, one.records[0].micro_batch) == (3, 1)
    assert (
        capd("import", tmp_path / "out", "--store", tmp_path / "again", "--run-id", "exp", "--json").json[
            "already"
        ]
        == 8
    )


def test_parts_whose_places_nobody_knows_make_no_claim(capd: Capd, tmp_path: Path) -> None:
    run = laid_out_run(tmp_path / "captures")

    done = capd("export", run, "--to", "sglang", "-o", tmp_path / "out", "--json")

    metas = {
        path.name.split("forward.")[1].split("___")[0]: torch.load(path, weights_only=True)["meta"]
        for path in (tmp_path / "out" / "exp").glob("*rank=0___*.pt")
    }
    assert UNRELATED in metas
    assert not {"dims", "megatron_parallel_info"} & metas[UNRELATED].keys()
    assert metas[UNRELATED]["capd"]["attributes"] == {"tp_rank": 0, "tp_size": 2}
    assert metas["weight.fsdp"]["dims"] == "d0[tp,dp] d1 # dp:=moe_dp"
    assert metas["weight.stage"]["dims"] == "d0 d1"
    assert metas["input.ordered"]["dims"] == "s[cp:zigzag] d1"
    assert (done.code, done.json["records"], done.json["left_out"]) == (0, 13, [])
    assert "2 records say nothing of how the parts of their ranks belong together" in done.err


def test_a_tensor_of_one_rank_has_plain_dimensions(capd: Capd, tmp_path: Path) -> None:
    run = laid_out_run(tmp_path / "captures")

    done = capd("export", run, "--to", "sglang", "--rank", "1", "--tensor", UNRELATED, "-o", tmp_path / "out")

    [path] = (tmp_path / "out" / "exp").iterdir()
    assert (done.code, done.err) == (0, "")
    assert torch.load(path, weights_only=True)["meta"]["dims"] == "d0 d1"


def test_names_that_had_to_be_changed_stay_different(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "captures")
    ends = ["a" * 300, "b" + "a" * 300, "x y", "x_y", "x___y"]
    for module in ends:
        key = linear_key(module=module, quant_type="q" * 200)
        writer.put("exp", key, np.ones((2, 2), np.float32), "float32", Moment())
    run = writer.close() / "exp.zarr"

    done = capd("export", run, "--to", "sglang", "-o", tmp_path / "out")

    assert (done.code, done.err) == (0, "")
    names = {path.name.split("name=")[1].split("___")[0] for path in (tmp_path / "out" / "exp").iterdir()}
    assert len(names) == len(ends)


def test_a_file_of_the_dumper_gets_key_and_placements_from_its_tags(capd: Capd, tmp_path: Path) -> None:
    value = torch.arange(6, dtype=torch.bfloat16).view(2, 1, 3)
    meta = {"dims": "t 1 h[tp] # cp:replicated", "world_rank": 1, "recompute_status": "disabled",
            "sglang_parallel_info": {"tp_rank": 1, "tp_size": 4, "cp_rank": 0, "cp_size": 2}}  # fmt: skip
    directory = tmp_path / "dump" / "exp"
    directory.mkdir(parents=True)
    torch.save(
        {"value": value, "meta": meta},
        directory / "step=7___rank=1___dump_index=3___name=mlp.fc1___layer_id=2.pt",
    )

    done = capd("import", tmp_path / "dump", "--store", tmp_path / "runs", "--run-id", "dumped", "--json")

    [series] = open_store(tmp_path / "runs" / "dumped.zarr").series
    [record] = series.records
    assert done.code == 0
    assert (series.key.module, series.key.tensor_name, series.key.layer, series.key.rank) == (
        "mlp",
        "fc1",
        2,
        1,
    )
    assert (series.key.quant_type, record.iteration) == ("bf16", 7)
    assert record.attributes == {
        "tp_rank": 1, "tp_size": 4, "tp_placement": "S(2)", "cp_rank": 0, "cp_size": 2, "cp_placement": "R",
        "mesh": ["tp", "cp"],
    }  # fmt: skip
    assert torch.equal(series.torch(0), value)
    assert record.metadata["recompute_status"] == "disabled"


def test_hostile_files_are_named_and_the_others_imported(capd: Capd, tmp_path: Path) -> None:
    directory = tmp_path / "dump"
    directory.mkdir()
    tags = "step=0___rank=0___dump_index={}___name=x"
    torch.save({"value": torch.ones(2), "meta": {}}, directory / f"{tags.format(1)}.pt")
    torch.save({"value": "text", "meta": {}}, directory / f"{tags.format(2)}.pt")
    torch.save({"value": torch.ones(2), "meta": {"dims": "a[["}}, directory / f"{tags.format(3)}.pt")
    (directory / f"{tags.format(4)}.pt").write_bytes(b"\x80\x04cos\nsystem\n.")
    os.symlink("/etc/hostname", directory / f"{tags.format(5)}.pt")
    info = {"tp_rank": 9, "tp_size": 2}
    torch.save(
        {"value": torch.ones(2), "meta": {"dims": "d0[tp]", "megatron_parallel_info": info}},
        directory / f"{tags.format(6)}.pt",
    )
    giant = tags.replace("rank=0", f"rank={'9' * 20}")
    torch.save({"value": torch.ones(2), "meta": {}}, directory / f"{giant.format(7)}.pt")
    torch.save({"value": torch.ones(2), "meta": {"step": -5}}, directory / f"{tags.format(8)}.pt")

    done = capd("import", directory, "--store", tmp_path / "runs", "--json")

    assert (done.code, done.json["imported"]) == (1, 1)
    reasons = {
        Path(one["file"]).name.split("dump_index=")[1][0]: one["reason"] for one in done.json["skipped"]
    }
    assert set(reasons) == {"2", "3", "4", "5", "6", "7", "8"}
    assert "no tensor" in reasons["2"]
    assert "grammar" in reasons["3"]
    assert "pickle" in reasons["4"]
    assert "symbolic link" in reasons["5"]
    assert "outside" in reasons["6"]
    assert "no whole number" in reasons["7"]
    assert "its step '-5'" in reasons["8"]


def test_what_the_comparator_has_no_word_for_is_left_out_and_counted(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "captures")
    attributes = {"tp_rank": 0, "tp_size": 2, "tp_placement": "S(0):2"}
    bits = np.ones((4, 2), np.float32)
    writer.put("exp", linear_key(tensor_name="weight"), bits, "float32", Moment(), attributes=attributes)
    writer.put("exp", linear_key(tensor_name="input"), bits, "float32", Moment())
    run = writer.close() / "exp.zarr"

    done = capd("export", run, "--to", "sglang", "-o", tmp_path / "out", "--json")

    assert done.code == 0
    assert "1 record left out" in done.err
    [left_out] = done.json["left_out"]
    assert (left_out["records"], "S(0):2" in left_out["reason"]) == (1, True)
    assert "S(0):2" in done.err
    assert len(list((tmp_path / "out" / "exp").iterdir())) == 1
