"""A job in tensor_saver's style on two ranks: everything is stored under its names, and the job is as without."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import capd
from capd_client.protocol.reference import parse_reference
from tests.kit import forking
from tests.kit.launching import assert_trained
from tests.kit.paths import REPOSITORY
from tests.kit.processes import daemons_on, until

JOB = Path(__file__).with_name("replaced_saver_job.py")
RANKS, STEPS, MICRO_BATCHES, LAYERS = 2, 2, 2, 2
EACH = RANKS * STEPS * MICRO_BATCHES * LAYERS


def torchrun(
    directory: Path, *before: str, job: Path = JOB, captured: bool = True, **environment: str
) -> str:
    """Run the job on two ranks below `before`; returns what it said."""
    directory.mkdir()
    done = forking.run(
        [*before, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
         str(job), str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
             **environment},
        cwd=directory, capture_output=True, text=True, timeout=110, inner=forking.TRAINING,
    )  # fmt: skip
    if captured:
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert_trained(done)
    return done.stdout + done.stderr


def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def only_run(store: Path) -> capd.Store:
    (run,) = store.glob("*.zarr")
    return capd.open(run)


def check_content(store: capd.Store, ranks: list[dict[str, Any]]) -> None:
    """Each tensor that was handed over is the one record that its reference names, bit for bit."""
    for number, rank in enumerate(ranks):
        assert len(rank["handed_over"]) == STEPS * MICRO_BATCHES * LAYERS * 3
        for tensor in rank["handed_over"]:
            series, index = store.record(tensor["reference"])
            key = series.key
            assert (key.rank, key.quant_type, key.layer_type) == (number, "mxfp8", "linear")
            for field in ("tensor_name", "operation", "layer"):
                assert getattr(key, field) == tensor[field]
            assert hashlib.sha256(series.numpy(index).tobytes()).hexdigest() == tensor["sha256"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same job with capture off."""
    directory = tmp_path_factory.mktemp("plain") / "job"
    torchrun(directory, captured=False)
    return told(directory)


def test_with_tensor_savers_switch_the_ranks_share_one_daemon_that_leaves_a_sealed_store(
    tmp_path: Path, plain: list[dict[str, Any]]
) -> None:
    store = tmp_path / "logs"
    torchrun(
        tmp_path / "job",
        TENSOR_SAVE_ENABLED="True", TENSOR_SAVE_DIR=str(store / "mxfp8"), CUSTOM_QUANT_TYPE="mxfp8",
    )  # fmt: skip

    ranks = told(tmp_path / "job")
    assert [(rank["losses"], rank["rng"]) for rank in ranks] == [
        (rank["losses"], rank["rng"]) for rank in plain
    ]
    assert {tensor["reference"] for rank in plain for tensor in rank["handed_over"]} == {None}
    until(lambda: not daemons_on(store), 20)
    run = only_run(store)
    totals = run.totals()
    assert (totals.records, totals.dropped, totals.clean) == (EACH * 4, {}, True)
    assert sum(series.zarr().shape[0] for series in run.series) == EACH * 4  # sealed
    check_content(run, ranks)


@pytest.mark.fault
def test_the_gradient_that_was_saved_as_a_backwards_input_is_found_by_both_names(tmp_path: Path) -> None:
    store = tmp_path / "logs"
    torchrun(tmp_path / "job", TENSOR_SAVE_ENABLED="true", TENSOR_SAVE_DIR=str(store))

    run = only_run(store)
    gradients = run.find(tensor_name="grad_output")
    assert {(series.key.tensor_name, series.key.operation) for series in gradients} == {("input", "backward")}
    assert sum(map(len, gradients)) == EACH
    assert sum(map(len, run.find(tensor_name="input"))) == 2 * EACH
    assert sum(map(len, run.find(tensor_name=["grad_output", "output"], operation="forward"))) == EACH
    assert [series.path for series in run.find(tensor_name="input", operation="backward")] == [
        series.path for series in gradients
    ]


@pytest.mark.fault
def test_below_capd_run_the_old_import_line_means_capds_module(
    tmp_path: Path, plain: list[dict[str, Any]]
) -> None:
    fork = tmp_path / "fork" / "megatron" / "core"
    fork.mkdir(parents=True)
    for package in (fork.parent, fork):
        (package / "__init__.py").write_text("")
    (fork / "tensor_saver.py").write_text("raise RuntimeError('tensor_saver itself was imported')\n")
    store = tmp_path / "store"
    said = torchrun(
        tmp_path / "job", sys.executable, "-m", "capd", "run", "--store", str(store), "--run-id", "run", "--",
        IMPORT_FROM="megatron.core.tensor_saver", CAPD_REPLACE_TENSOR_SAVER="1", CUSTOM_QUANT_TYPE="mxfp8",
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(tmp_path / "fork")]),
    )  # fmt: skip

    ranks = told(tmp_path / "job")
    assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in plain]
    assert f"{EACH * 4} records in" in said
    run = capd.open(store / "run.zarr")
    check_content(run, ranks)
    assert {series.key.module for series in run.series} == {""}  # the model itself is not watched as well


@pytest.mark.fault
def test_a_reference_names_its_record_by_key_and_moment(tmp_path: Path) -> None:
    torchrun(tmp_path / "job", TENSOR_SAVE_ENABLED="true", TENSOR_SAVE_DIR=str(tmp_path / "logs"))

    for tensor in told(tmp_path / "job")[1]["handed_over"]:
        key, moment = parse_reference(tensor["reference"])
        assert key["rank"] == 1
        assert moment["sample_idx"] in range(MICRO_BATCHES)
        assert moment["iteration"] in range(STEPS)
