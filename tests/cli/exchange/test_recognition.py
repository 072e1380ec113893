"""`capd import` of a directory in which several tools, or several jobs, wrote their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kit.store.cli import Result

Capd = Callable[..., Result]
LINE = "2026-01-01 00:00:00,000 - INFO - a_max \t\t\t\t iteration=000000 \t\t\t\t value=0.5000\n"


def sglang(directory: Path) -> None:
    directory.mkdir(parents=True)
    torch.save({"value": torch.ones(2), "meta": {}}, directory / "step=0___rank=0___dump_index=1___name=x.pt")


def megatron(directory: Path) -> None:
    directory /= "wgrads/iter_0000001"
    directory.mkdir(parents=True)
    torch.save({"model_chunk0": {"a.weight": torch.ones(2)}}, directory / "mp_rank_00.pth")


def nvdlfw(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "x_globalrank-0.log").write_text(LINE)


def pt(directory: Path) -> None:
    directory.mkdir(parents=True)
    metadata = {"layer_type": "linear", "operation": "forward", "tensor_name": "input", "rank": 0}
    torch.save({"tensor": torch.ones(2), "tensor_info": {}, "metadata": metadata}, directory / "saved.pt")


def msprobe(directory: Path) -> None:
    directory /= "step0/rank0"
    (directory / "dump_tensor_data").mkdir(parents=True)
    torch.save(torch.ones(2), directory / "dump_tensor_data" / "x.pt")
    told = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "data_name": "x.pt"}
    data = {"Module.fc.Linear.forward.0": {"input_args": [told], "output": []}}
    (directory / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L0", "data": data}))


TOOLS = {"msprobe": msprobe, "sglang": sglang, "megatron": megatron, "nvdlfw": nvdlfw, "pt": pt}


def test_files_of_several_tools_are_named_and_each_can_be_chosen(capd: Capd, tmp_path: Path) -> None:
    for name, write in TOOLS.items():
        write(tmp_path / "mixed" / name)

    done = capd("import", tmp_path / "mixed", "--store", tmp_path / "runs", "--json")

    assert (done.code, done.out) == (2, "")
    assert (
        "msprobe (1), sglang (1), megatron (1), nvdlfw (1), pt (1); import each with --from TOOL" in done.err
    )
    assert not (tmp_path / "runs").exists()
    for name in TOOLS:
        options = ("--from", name, "--store", tmp_path / "runs", "--run-id", name, "--json")
        chosen = capd("import", tmp_path / "mixed", *options)
        assert (chosen.code, chosen.json["format"]) == (0, name), chosen.err
        assert (chosen.json["files"], chosen.json["imported"], chosen.json["skipped"]) == (1, 1, [])


@pytest.mark.parametrize("tool", ["msprobe", "sglang", "megatron"])
def test_files_of_two_jobs_never_become_one_run(capd: Capd, tmp_path: Path, tool: str) -> None:
    for job in ("a", "b"):
        TOOLS[tool](tmp_path / "jobs" / job)

    done = capd("import", tmp_path / "jobs", "--store", tmp_path / "runs")

    assert done.code == 2
    assert "by itself" in done.err
    assert str(tmp_path / "jobs" / "b") in done.err


def test_a_dump_with_a_number_that_no_job_has_is_skipped_and_the_others_are_imported(
    capd: Capd, tmp_path: Path
) -> None:
    for name in ("good", "bad"):
        msprobe(tmp_path / name)
    (tmp_path / "bad/step0/rank0").rename(tmp_path / "good/step0/rank99999999999")

    done = capd("import", tmp_path / "good", "--store", tmp_path / "runs", "--json")

    assert (done.code, done.json["imported"], len(done.json["skipped"])) == (1, 1, 1)
    assert "is none that a job has" in done.err


def test_an_option_of_another_tool_is_refused(capd: Capd, tmp_path: Path) -> None:
    sglang(tmp_path / "dump")

    done = capd("import", tmp_path / "dump", "--store", tmp_path / "runs", "--pp", "2", "--layers", "2")

    assert done.code == 2
    assert "are of Megatron, and these files of sglang" in done.err


def test_the_sentence_at_the_end_counts_records_and_files(capd: Capd, tmp_path: Path) -> None:
    megatron(tmp_path / "saved")

    done = capd("import", tmp_path / "saved", "--store", tmp_path / "runs")

    assert done.out == f"{tmp_path}/runs/saved.zarr: 1 record imported (8 B raw); 1 file read\n"


def test_a_directory_without_files_of_the_tool_is_said(capd: Capd, tmp_path: Path) -> None:
    pt(tmp_path / "saved")

    done = capd("import", tmp_path / "saved", "--store", tmp_path / "runs", "--from", "sglang")

    assert done.code == 5
    assert "no file of sglang" in done.err
