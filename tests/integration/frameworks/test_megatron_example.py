"""The example of a collection around Megatron-LM runs as its README says: two types, two ranks, exact micro-batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import capd
from tests.kit.jobs.products import assert_products_hold

EXAMPLE = Path(__file__).parents[3] / "examples" / "megatron"
TYPES = ("bf16", "mxfp8")

pytestmark = pytest.mark.timeout(240)


@pytest.mark.fault  # half a minute each
@pytest.mark.parametrize("parallel", ["tensor", "data"])
def test_each_type_has_the_micro_batches_asked_for_of_both_ranks_and_layers(
    tmp_path: Path, parallel: str
) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    text = tmp_path / "text.md"
    text.write_bytes(Path(__file__).read_bytes())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {"TRAIN_SCRIPT": str(EXAMPLE / "train_gpt.sh"), "PARALLEL": parallel, "PATH": path}
    options = ("--quant-type", ",".join(TYPES), "--control-iter", "3", "--collect-micro-batches", "2")

    done = subprocess.run(
        ["bash", str(EXAMPLE / "run_tensor_collection.sh"), "batch", *options, "--data-path", str(text)],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "enhanced_tensor_logs").glob("*.zarr")
    assert_products_hold(run)
    store = capd.open(run)
    assert {series.key.quant_type for series in store.series} == set(TYPES)
    for name in TYPES:
        for rank in (0, 1):
            for layer in (0, 1):
                found = store.find(quant_type=name, rank=rank, layer=layer)
                moments = {(one.iteration, one.micro_batch) for series in found for one in series.records}
                assert moments == {(0, 0), (0, 1), (1, 0)}, (name, rank, layer)
                assert {"query", "grad_output", "input"} <= {series.key.tensor_name for series in found}
        assert {series.key.rank for series in store.find(quant_type=name)} == {0, 1}
        own = run.with_suffix(".collection") / "runs" / name
        assert {file.name for file in (own / "checkpoints").glob("*.pt")} == {"rank0.pt", "rank1.pt"}
        assert (own / "tensorboard" / "loss.jsonl").read_text().count("\n") >= 1
