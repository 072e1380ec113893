"""The code blocks of tensor_saver's documents, with the import line changed, and below `capd run` without that."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import capd
from capd_client import tensor_saver
from tests.integration.tensor_saver.saver_job import TENSOR_SAVER, blocks
from tests.kit import forking
from tests.kit.paths import REPOSITORY
from tests.kit.processes import Daemon

JOB = Path(__file__).with_name("saver_job.py")
OUTPUT = ("linear", "forward", "post", "linear", "output")
ELIDED = ("linear", "forward", "unknown", "unknown", "elided")
ATTENTION = [("attention", "forward", "pre", "FA", name) for name in ("query", "key", "value")]
FORWARD = [("linear", "forward", "pre", "linear", name) for name in ("input", "weight")]
BACKWARD = [("linear", "backward", "pre", "linear", name) for name in ("input", "weight")]


def rows(
    names: list[tuple[str, ...]],
    layer: int | None,
    quant_type: str,
    rank: int = 0,
    sample: int = 0,
    iteration: int = 0,
) -> list[tuple[Any, ...]]:
    return [(*name, layer, quant_type, rank, sample, iteration) for name in names]


EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "000-1": rows([OUTPUT], 0, "bf16"),
    "000-2": rows([ELIDED], None, "bf16"),
    "000-3": [row for i in range(2) for s in range(2) for row in rows([ELIDED], None, "bf16", 0, s, i)],
    "001-0": rows([OUTPUT], 5, "mxfp4", 3, 6),
    "002-3": rows(ATTENTION, 1, "mxfp4"),
    "002-4": rows(FORWARD, 5, "mxfp4") + rows(BACKWARD, 5, "mxfp4"),
    "002-6": rows(ATTENTION, 0, "hifp8") + rows(FORWARD, 1, "mxfp8"),
}
ENVIRONMENT = {"CUSTOM_QUANT_TYPE": "mxfp4"}
OF_BLOCK = {"001-0": {"LOCAL_RANK": "3", "CURRENT_SAMPLE_IDX": "6"}}


def stored(run: Path) -> list[tuple[Any, ...]]:
    found = []
    for series in capd.open(run).series:
        key = series.key
        names = (
            key.layer_type,
            key.operation,
            key.phase,
            key.component,
            key.tensor_name,
            key.layer,
            key.quant_type,
        )
        found += [(*names, key.rank, record.sample_idx, record.iteration) for record in series.records]
    return sorted(found, key=repr)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all blocks."""
    with tempfile.TemporaryDirectory(prefix="capd-t-", dir="/tmp") as runtime:
        daemon = Daemon(tmp_path_factory.mktemp("seeds") / "store", Path(runtime)).start()
        yield daemon
        daemon.discard()


def run_block(node: Daemon, *names: str, **more: str) -> Path:
    """Run blocks as a job of the daemon's; returns its run."""
    run_id = "-".join(names)
    done = forking.run(
        [sys.executable, str(JOB), *names], capture_output=True, text=True, timeout=60,
        env=environment(CAPD_ENDPOINT=node.endpoint, CAPD_RUN_ID=run_id, CAPD_POLICY="block", **ENVIRONMENT, **more),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counters = json.loads(done.stdout.splitlines()[-1])
    assert (counters["offered"], counters["dropped"]) == (counters["committed"], {})
    return node.store / f"{run_id}.zarr"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_block_with_its_import_line_changed_records_what_it_names(node: Daemon, name: str) -> None:
    run = run_block(node, name, **OF_BLOCK.get(name, {}))

    assert stored(run) == sorted(EXPECTED[name], key=repr)


def test_variables_that_a_block_sets_in_the_process_hold_for_the_next_call(node: Daemon) -> None:
    run = run_block(node, "001-4", "000-1", "001-5", LOCAL_RANK="9", CURRENT_SAMPLE_IDX="9")

    assert stored(run) == EXPECTED["000-1"]


def test_the_line_that_a_document_prints_is_one_of_the_debug_log(node: Daemon) -> None:
    names = {"rank": 3, "sample_idx": 6, "layer_type": "linear", "operation": "forward"}
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(blocks()["001-2"], dict(names))  # noqa: S102 - the document's line
    command = [sys.executable, str(JOB), "001-0"]
    done = forking.run(
        command, capture_output=True, text=True, timeout=60,
        env=environment(
            CAPD_ENDPOINT=node.endpoint, CAPD_RUN_ID="debug", CAPD_LOG="debug", **ENVIRONMENT, **OF_BLOCK["001-0"]
        ),
    )  # fmt: skip

    told = dict(part.split(": ") for part in shown.getvalue().partition(" - ")[2].strip().split(", "))
    assert told == {"Rank": "3", "Sample": "6", "Layer": "linear", "Operation": "forward"}
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("capd: output: ")]
    for word, value in told.items():
        assert f"{word.lower()} {value}" in line


def test_the_metadata_that_a_document_shows_is_in_the_record(node: Daemon) -> None:
    shown = ast.literal_eval(blocks()["000-6"].strip())
    (series,) = capd.open(run_block(node, "000-1", "000-8")).series
    record = series.records[0]

    del shown["save_time"]  # record.time_ns
    assert shown.pop("layer_idx") == series.key.layer
    for name, value in shown.items():
        assert getattr(record if name in ("sample_idx", "iteration") else series.key, name) == value


def test_the_functions_that_a_document_lists_are_there_with_their_parameters() -> None:
    listed = re.findall(r"^(\w+)\((.*?)\)", blocks()["000-0"], re.M)

    assert len(listed) == 7
    for name, parameters in listed:
        found = inspect.signature(getattr(tensor_saver, name)).parameters
        assert list(found) == [
            part.partition("=")[0].partition(":")[0].strip() for part in parameters.split(",") if part
        ]


@pytest.mark.parametrize(
    ("shell", "script", "block", "directory", "expected"),
    [
        ("001-1", "", "000-1", "enhanced_tensor_logs", EXPECTED["000-1"]),
        ("002-2", "", "002-3", "tensor_logs", rows(ATTENTION, 1, "hifp8")),
        pytest.param("000-7", "run_wikipedia_tensor_collection.sh", "000-1", "enhanced_tensor_logs", EXPECTED["000-1"],
                     marks=pytest.mark.slow),
        pytest.param("001-3", "run_wikipedia_tensor_collection.sh", "000-1", "enhanced_tensor_logs", EXPECTED["000-1"],
                     marks=pytest.mark.slow),
        pytest.param("002-5", "examples/llama/train_llama32_1b_h100_fp8.sh", "002-3", "tensor_logs/experiment_001",
                     rows(ATTENTION, 1, "hifp8"), marks=pytest.mark.slow),
    ],
    ids=["001-1", "002-2", "000-7", "001-3", "002-5"],
)  # fmt: skip
def test_what_a_shell_block_sets_and_runs_is_as_before(
    tmp_path: Path, shell: str, script: str, block: str, directory: str, expected: list[tuple[Any, ...]]
) -> None:
    training = f'"{forking.stand_in_for(environment())}" "{JOB}" {block}\n'
    lines = blocks()[shell]
    if script:  # which the block runs
        (tmp_path / script).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / script).write_text(training)
    else:
        lines += training
    document = shell.partition("-")[0]
    switched_on = {"TENSOR_SAVE_ENABLED": "true"} if document == "001" else {}  # as another document has it

    done = subprocess.run(
        ["bash", "-ec", lines], cwd=tmp_path, capture_output=True, text=True, timeout=100,
        env=environment(**switched_on),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / directory).glob("*.zarr")
    assert stored(run) == sorted(expected, key=repr)


def test_below_capd_run_the_blocks_need_no_change_at_all(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for package in (core.parent, core):
        (package / "__init__.py").write_text("")
    names = ["000-1", "000-2", "000-3", "002-3", "002-4", "002-6"]

    done = forking.run(
        [sys.executable, "-m", "capd", "run", "--store", "store", "--run-id", "run", "--",
         sys.executable, str(JOB), *names],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, inner=forking.TORCH,
        env=environment(
            CAPD_REPLACE_TENSOR_SAVER="1", IMPORT_FROM=TENSOR_SAVER, TENSOR_SAVE_ENABLED="true",
            PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(tmp_path)]), **ENVIRONMENT,
        ),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = [row[:8] for row in stored(tmp_path / "store" / "run.zarr")]  # one process: the state goes on
    assert found == sorted([row[:8] for name in names for row in EXPECTED[name]], key=repr)
