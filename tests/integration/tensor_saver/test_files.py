"""What tensor_saver's documents do with its files: their blocks on the files of `capd export`, without capd."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.tensor_saver.saver_job import blocks
from tests.kit import forking
from tests.kit.jobs.products import assert_products_hold
from tests.kit.paths import REPOSITORY
from tests.kit.processes import daemons_on, until

JOB = Path(__file__).with_name("saver_job.py")
TYPES = {"hifp8": 3, "mxfp8": 2, "mxfp4": 8}  # files of each that the blocks give
WITHOUT_CAPD = "import sys\nsys.modules['capd'] = sys.modules['capd_client'] = None\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `enhanced_tensor_logs`: what the blocks of 001 and 002 record, as the files that 004 shows."""
    directory = tmp_path_factory.mktemp("seed-files")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUSTOM_QUANT_TYPE": "mxfp4"}
    command = [sys.executable, str(JOB), "001-0", "002-3", "002-4", "002-6"]
    done = forking.run(
        command, cwd=directory, capture_output=True, text=True, timeout=100,
        env={**environment, "TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": "store"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = (directory / "store").glob("*.zarr")
    assert_products_hold(run, none="its calls name tensors of no module")
    command = [
        sys.executable,
        "-m",
        "capd",
        "export",
        str(run),
        "--names",
        "B",
        "--out",
        "enhanced_tensor_logs",
    ]
    done = forking.run(command, cwd=directory, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    until(lambda: not daemons_on(directory / "store"), 20)
    return directory


def shell(script: str, directory: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", script], cwd=directory, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def loaded(directory: Path, pattern: str) -> list[dict[str, Any]]:
    return [
        torch.load(path, weights_only=True)
        for path in sorted((directory / "enhanced_tensor_logs").glob(pattern))
    ]


@pytest.mark.slow
def test_the_loop_over_the_files_runs_where_there_is_no_capd(files: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT_CAPD + blocks()["004-8"]],
        cwd=files, capture_output=True, text=True, timeout=100,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    shown = [
        dict(line.split(": ", 1) for line in part.split("\n"))
        for part in done.stdout.split("\n---\n")
        if part
    ]
    assert len(shown) == TYPES["mxfp8"]
    for one in shown:
        assert re.fullmatch(
            r"enhanced_tensor_logs/mxfp8/\d{8}_\d{6}_\d{4}_linear_L1_forward_pre_linear_mxfp8_(input|weight).pt",
            one["文件"],
        )
        assert one["形状"] == "torch.Size([2, 3])"
        assert one["数据类型"] == "torch.bfloat16"
        assert [one[name] for name in ("量化类型", "阶段", "组件", "操作")] == [
            "mxfp8",
            "pre",
            "linear",
            "forward",
        ]


def test_a_file_holds_what_the_document_shows(files: Path) -> None:
    sizes = {"batch_size": 2, "seq_len": 3, "hidden_size": 4}
    shown = eval(blocks()["002-1"], {"torch": torch, **sizes})  # noqa: S307 - the document's dictionary
    (found,) = loaded(files, "hifp8/*_query.pt")

    assert found.keys() == shown.keys()
    assert isinstance(found["tensor"], shown["tensor"])
    for name in ("tensor_info", "metadata"):
        assert shown[name].keys() <= found[name].keys()
        assert {key: type(found[name][key]) for key in shown[name]} == {
            key: type(value) for key, value in shown[name].items()
        }
    del shown["metadata"]["save_time"]
    assert shown["metadata"].items() <= found["metadata"].items()
    assert found["metadata"]["experiment"] == "test_run"


def test_the_directories_of_the_types_are_listed_as_before(files: Path) -> None:
    listed = shell(blocks()["004-6"], files)

    everything, *each = re.split(r"\n(?=total )", listed.partition("total ")[2])
    assert listed.count(".pt\n") == 2 * sum(TYPES.values())
    assert {name: listed.count(f"_{name}_") for name in TYPES} == {n: 2 * count for n, count in TYPES.items()}
    assert (everything.count(".pt"), len(each)) == (TYPES["hifp8"], 5)


def test_files_are_found_by_their_names_as_before(files: Path) -> None:
    commands = [line for line in blocks()["004-18"].splitlines() if line.startswith("find")]
    pre, post, attention, linear = (len(shell(command, files).splitlines()) for command in commands)

    assert (pre, post, attention, linear) == (10, 1, 6, 7)  # of the first, those that `head -10` lets through


def test_what_a_script_exports_is_what_a_document_echoes(tmp_path: Path) -> None:
    assert shell(blocks()["002-2"] + blocks()["004-13"], tmp_path).split() == ["true", "./tensor_logs"]
