"""What tensor_saver's users typed to collect, typed again: its script's lines, and what stands for the others."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import capd
from tests.integration.collections.collect_job import MICRO_BATCHES
from tests.kit.paths import REPOSITORY

JOB = REPOSITORY / "tests" / "integration" / "collections" / "collect_job.py"
DATA = "dataset/wikipedia_processed/wikipedia_processed_text_document"
TRAIN = f"""set -eu
mkdir -p "$1" "$2"
test "$3 $4 $5" = "model/llama3.2-1b {DATA} bf16"
test "$HOST_TENSORBOARD_LOGS_PATH" = "$2"
exec {sys.executable} {JOB} --checkpoint "$1/step"
"""
ALL = {"bf16", "mxfp8", "mxfp4", "hifp8"}

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A directory that looks as tensor_saver's did; its training script runs a small model on a CPU."""
    script = tmp_path / "examples" / "llama" / "train_llama32_1b_h100_fp8.sh"
    script.parent.mkdir(parents=True)
    script.write_text(TRAIN)
    for suffix in (".bin", ".idx"):
        file = tmp_path / f"{DATA}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    wrapper = tmp_path / "run_tensor_collection.sh"
    wrapper.write_bytes((REPOSITORY / "examples" / "megatron" / "run_tensor_collection.sh").read_bytes())
    wrapper.chmod(0o755)
    return tmp_path


def typed(line: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", line],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def kept(directory: Path) -> dict[str, set[tuple[int, int]]]:
    """By type, iteration and micro-batch of what is in the newest run where tensor_saver had its files."""
    [run] = (directory / "enhanced_tensor_logs").glob("*.zarr")
    found: dict[str, set[tuple[int, int]]] = {}
    for series in capd.open(run).series:
        moments = found.setdefault(series.key.quant_type, set())
        moments |= {(record.iteration, record.micro_batch) for record in series.records}
    return found


@pytest.mark.parametrize(
    ("line", "types", "micro_batches"),
    [
        ("./run_tensor_collection.sh single mxfp8", {"mxfp8"}, {(0, 0)}),
        pytest.param(
            "./run_tensor_collection.sh --mode single --quant-type mxfp8 --control-iter 3 --collect-micro-batches 2",
            {"mxfp8"},
            {(0, 0), (0, 1), (1, 0)},
            marks=pytest.mark.slow,
        ),
        pytest.param("./run_tensor_collection.sh batch", ALL, {(0, 0)}, marks=pytest.mark.fault),
        pytest.param("./run_tensor_collection.sh quick hifp8", {"hifp8"}, {(0, 0)}, marks=pytest.mark.slow),
        pytest.param(
            "./run_tensor_collection.sh --mode single --quant-type mxfp8 --control-iter 10",
            {"mxfp8"},
            {(iteration, 0) for iteration in range(10)},
            marks=pytest.mark.fault,
        ),
        pytest.param("./run_tensor_collection.sh quick mxfp8", {"mxfp8"}, {(0, 0)}, marks=pytest.mark.fault),
    ],
)
def test_the_lines_of_tensor_savers_script_collect_what_they_say(
    line: str, types: set[str], micro_batches: set[tuple[int, int]], megatron: Path
) -> None:
    assert MICRO_BATCHES == 2  # of an iteration, of which M = 1 leaves one out

    done = typed(line, megatron)

    assert done.returncode == 0, done.stderr
    assert kept(megatron) == dict.fromkeys(types, micro_batches)
    assert "mxfp8, 1 of 1 (emulation: mxfp8)" in done.stderr or types != {"mxfp8"}


@pytest.mark.fault
def test_whatever_was_typed_beside_it_has_a_line_that_works(megatron: Path) -> None:
    text = (REPOSITORY / "docs" / "migration-runs.md").read_text()
    table = text[text.index("Earlier scripts and commands") : text.index("## Drawing")]
    rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
    assert len(rows) == 10
    lines = [line for *_, now in rows for line in re.findall(r"`((?:capd|\./run)[^`]*)`", now)]

    for line in lines:
        if line == "./run_tensor_collection.sh batch":  # the last test's
            continue
        done = typed(line, megatron)
        assert done.returncode == 0, (line, done.stderr)
        assert done.stdout, line

    files = sorted((megatron / "files" / "mxfp8").glob("*.pt"))
    assert any("_attention_L0_forward_pre_FA_mxfp8_query.pt" in file.name for file in files)
    looked = typed(
        "find files -name '*_pre_*' | wc -l; find files -name '*_FA_*' | wc -l; find files -name '*_linear_*' | wc -l",
        megatron,
    )
    assert all(int(count) > 0 for count in looked.stdout.split())


@pytest.mark.slow
def test_what_the_script_does_not_know_is_refused_before_anything_starts(megatron: Path) -> None:
    for words, said in [
        (("batsh",), "batsh is neither a mode"),
        (("--nonsense", "1"), "No such option"),
        (("quick", "--control-iter", "2"), "--mode single"),
        (("single", "--data-path", "gone"), "--require: gone does not exist"),
        (("--control-iter", "0"), "CAPD_MAX_DISK"),
    ]:
        done = typed(shlex.join(["./run_tensor_collection.sh", *words]), megatron)
        assert done.returncode == 2, words
        assert said in done.stderr
    assert not (megatron / "enhanced_tensor_logs").exists()
