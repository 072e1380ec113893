"""`capd export --to tensorboard`: opened by TensorBoard's own accumulator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from capd_client.protocol.scalars import scalar_key
from tests.kit.store.cli import Result, StoreWriter, linear_key

Capd = Callable[..., Result]
NAME = "blocks.blocks.0.mlp.fc1.forward.input"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = StoreWriter(tmp_path_factory.mktemp("captures"))
    rng = np.random.default_rng(0)
    for iteration in range(3):
        values = rng.standard_normal((16, 8)).astype(np.float32)
        values[0, :3] = 0.0, np.nan, 2.0**-140
        writer.put("exp", linear_key(), values, "float32", Moment(iteration=iteration, time_ns=iteration))
        loss = np.array(3.5 - iteration)
        writer.put(
            "exp", scalar_key("loss", 0), loss, "float64", Moment(iteration=iteration, time_ns=iteration)
        )
    return writer.close() / "exp.zarr"


def test_the_accumulator_returns_the_exact_counts_and_statistics(
    capd: Capd, run: Path, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard reads its events"
    )

    done = capd("export", run, "--to", "tensorboard", "-o", tmp_path, "--json")

    assert (done.code, done.json["files"], done.json["records"]) == (0, 1, 6)
    events = accumulator.EventAccumulator(
        str(tmp_path / "exp" / "rank0"), size_guidance={"histograms": 0, "scalars": 0}
    )
    events.Reload()
    records = next(one for one in open_store(run).series if one.key.tensor_name == "input").records
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(0, 3.5), (1, 2.5), (2, 1.5)]
    for event, record in zip(events.Scalars(f"absmax/{NAME}"), records, strict=True):
        assert event.step == record.iteration
        assert event.value == np.float32(record.stats.absmax)
    assert [one.value for one in events.Scalars(f"nonfinite/{NAME}")] == [1, 1, 1]
    for event, record in zip(events.Histograms(f"log2_abs/{NAME}"), records, strict=True):
        found = dict(zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True))
        counts = {end: count for end, count in found.items() if count}
        expected = {e - 126.0: n for e, n in record.stats.exponent_histogram.items() if e != 255}
        assert counts == expected
        assert sum(counts.values()) == record.stats.count - record.stats.nan - record.stats.inf


def test_a_second_export_replaces_nothing(capd: Capd, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard`")
    capd("export", run, "--to", "tensorboard", "-o", tmp_path)

    done = capd("export", run, "--to", "tensorboard", "-o", tmp_path)

    assert done.code != 0
    assert "holds files already" in done.err


def test_series_of_one_name_have_tags_that_say_in_what_they_differ(capd: Capd, tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard reads its events"
    )
    writer = StoreWriter(tmp_path / "captures")
    # Files of tensor_saver name no module.
    for layer, value in ((0, 1.0), (1, 2.0)):
        for quant_type in ("bf16", "mxfp8"):
            key = linear_key(module="", stack="", layer=layer, quant_type=quant_type)
            bits = np.full((2, 2), value + (quant_type == "mxfp8") * 10, np.float32)
            writer.put("exp", key, bits, "float32", Moment(iteration=5))
    writer.put("exp", linear_key(), np.ones((2, 2), np.float32), "float32", Moment(iteration=5))
    run = writer.close() / "exp.zarr"

    assert capd("export", run, "--to", "tensorboard", "-o", tmp_path / "out").code == 0

    events = accumulator.EventAccumulator(str(tmp_path / "out" / "exp" / "rank0"))
    events.Reload()
    found = {
        tag.removeprefix("absmax/"): [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag.startswith("absmax/")
    }
    assert found == {
        "forward.input[quant_type=bf16,layer=0]": [(5, 1.0)],
        "forward.input[quant_type=mxfp8,layer=0]": [(5, 11.0)],
        "forward.input[quant_type=bf16,layer=1]": [(5, 2.0)],
        "forward.input[quant_type=mxfp8,layer=1]": [(5, 12.0)],
        NAME: [(5, 1.0)],
    }


def test_an_export_without_room_fails_and_leaves_no_file_of_events(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard`")
    # A file of one block is too small for the events.
    command = ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", sys.executable, "-m", "capd"]

    done = subprocess.run(
        [*command, "export", run, "--to", "tensorboard", "-o", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode != 0
    assert "Make room and export again" in done.stderr
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
