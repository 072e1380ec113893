"""Mode stats on real jobs with a real daemon: statistics as numpy computes them, and hardly any bytes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray

import capd as capd_package
from capd.store.format.statistics import Stats
from capd.store.read.store import Record, Series
from capd_client.protocol.statistics_row import ROW_FIELDS, ROW_VALUES
from tests.integration.rules import statistics_job
from tests.kit import content, forking
from tests.kit.jobs.modes import ITERATIONS, MICRO_BATCHES, job, train
from tests.kit.processes import Daemon, StartRank, capd, until


def plain_statistics(tensor: torch.Tensor) -> dict[str, float]:
    """What numpy makes of the values as float64; NaN for what needs a finite one."""
    values = tensor.to(torch.float64).numpy().reshape(-1)
    finite = values[np.isfinite(values)]
    extremes = [f(finite) if finite.size else math.nan for f in (np.min, np.max, np.mean, np.std)]
    return {
        "count": values.size,
        "nan": int(np.isnan(values).sum()),
        "inf": int(np.isinf(values).sum()),
        "zero": int((values == 0).sum()),
        "min": extremes[0],
        "max": extremes[1],
        "absmax": max(-extremes[0], extremes[1]),
        "sum": finite.sum(),
        "sum_sq": np.square(finite).sum(),
        "mean": extremes[2],
        "std": extremes[3],
    }


def numbers(stats: Stats, names: Iterable[str] = ROW_FIELDS) -> dict[str, float]:
    """Fields of the statistics; NaN for none."""
    return {name: math.nan if (value := getattr(stats, name)) is None else value for name in names}


def plain_exponents(tensor: torch.Tensor) -> dict[int, int]:
    """How many values have which biased exponent as float32; the largest finite one for what float32 cannot hold."""
    values = tensor.to(torch.float64).numpy().reshape(-1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        fields = values.astype("f4").view("u4") >> 23 & 0xFF
    fields = np.where(np.isfinite(values) & (fields == 255), 254, fields)
    return {int(bin_): int(n) for bin_, n in zip(*np.unique(fields, return_counts=True), strict=True)}


def assert_statistics(stats: Stats, tensor: torch.Tensor) -> None:
    expected = plain_statistics(tensor)
    assert numbers(stats, expected) == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)
    assert stats.exponent_histogram == plain_exponents(tensor)


def capture_all(daemon: Daemon, **environment: str) -> dict[str, Any]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")}
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    done = forking.run(
        [sys.executable, statistics_job.__file__],
        env={
            **inherited,
            "PYTHONPATH": path,
            "CAPD_STRICT": "1",
            "CAPD_ENDPOINT": daemon.endpoint,
            "CAPD_RUN_ID": "run",
            "CAPD_ARENA_BYTES": str(16 << 20),
            **environment,
        },
        check=True,
        timeout=100,
        stdout=subprocess.PIPE,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def by_name(run: Path) -> dict[str, tuple[Series, Record]]:
    return {s.key.tensor_name: (s, s.records[0]) for s in capd_package.open(run).series}


def zarr_row(series: Path) -> NDArray[np.float64]:
    array = zarr.open_array(series / "data", mode="r")
    assert array.shape == (1, ROW_VALUES)
    row: NDArray[np.float64] = np.asarray(array[0])
    return row


def test_statistics_of_every_kind_of_tensor_are_those_of_numpy(daemon: Daemon) -> None:
    said = capture_all(daemon, CAPD_MODE="stats")
    daemon.stop()

    tensors = statistics_job.tensors()
    run = daemon.store / "run.zarr"
    found = by_name(run)
    assert said == {
        "flushed": True,
        "counters": {"offered": len(tensors), "committed": len(tensors), "in_flight": 0, "dropped": {}},
    }
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        series, record = found[name]
        assert (series.kept, series.dtype) == ("statistics", str(tensor.dtype).removeprefix("torch."))
        assert record.shape == tuple(tensor.shape)
        if name != "int64":
            assert_statistics(record.stats, tensor)
        row = dict(zip(ROW_FIELDS, zarr_row(run / series.path).tolist(), strict=False))  # with no capd at all
        assert row == pytest.approx(numbers(record.stats), nan_ok=True)
    whole = found["int64"][1].stats
    assert (whole.min, whole.max, whole.absmax) == (-(2**63), 2**62, 2**63)


@pytest.mark.fault
def test_the_same_captures_take_a_small_part_of_the_room(daemon: Daemon) -> None:
    capture_all(daemon, CAPD_RUN_ID="full", CAPD_MODE="tensor")
    capture_all(daemon, CAPD_RUN_ID="few", CAPD_MODE="stats")
    daemon.stop()

    stored = {
        run: sum(s.stored_bytes for s in capd_package.open(daemon.store / f"{run}.zarr").series)
        for run in ("full", "few")
    }
    assert stored["few"] * 100 < stored["full"]
    full, few = (by_name(daemon.store / f"{run}.zarr") for run in ("full", "few"))
    for name, (_, record) in full.items():
        stats, other = record.stats, few[name][1].stats
        assert other.exponent_histogram == stats.exponent_histogram
        assert numbers(other) == pytest.approx(numbers(stats), nan_ok=True)


def test_a_training_loop_keeps_its_losses_and_leaves_statistics_of_all_operands(
    daemon: Daemon, tmp_path: Path
) -> None:
    held = job(daemon, tmp_path / "on.pt", CAPD_MODE="stats")
    plain = train(tmp_path / "off.pt")
    daemon.stop()

    assert held["losses"] == plain["losses"]
    assert torch.equal(held["random"], plain["random"])
    records = {
        (series.key.module, series.key.tensor_name, record.iteration, record.micro_batch): record
        for series in capd_package.open(daemon.store / "run.zarr").series
        for record in series.records
    }
    operands = {at: tensor for at, tensor in held["operands"].items() if at in records}
    assert len(records) == len(operands) == 2 * ITERATIONS * (3 * MICRO_BATCHES + 1)  # a weight once per step
    for at, record in records.items():
        assert record.shape == tuple(operands[at].shape)
        assert_statistics(record.stats, operands[at])
    listed = json.loads(capd("ls", str(daemon.store / "run.zarr"), "--json").stdout)
    assert {item["kept"] for item in listed} == {"statistics"}
    assert json.loads(capd("verify", str(daemon.store / "run.zarr"), "--json").stdout)["ok"]


@pytest.mark.slow
def test_a_daemon_killed_again_and_again_loses_and_repeats_no_statistics(
    daemon: Daemon, start_rank: StartRank
) -> None:
    rank = start_rank(CAPD_MODE="stats")
    rank.ask("stream 0")
    run = daemon.store / "run.zarr"
    for _ in range(3):
        before = rank.ask("counters")["committed"]
        until(lambda least=before + 20: rank.ask("counters")["committed"] >= least)
        daemon.kill()
        acked = rank.ask("counters")["committed"]
        assert acked <= len({r.iteration for s in capd_package.open(run).series for r in s.records})
        daemon.start()
    total = rank.ask("halt")
    assert rank.ask("flush") is True
    assert rank.ask("counters") == {"offered": total, "committed": total, "in_flight": 0, "dropped": {}}
    rank.leave()
    daemon.stop()

    records = [r for s in capd_package.open(run).series for r in s.records]
    assert sorted(r.iteration for r in records) == list(range(total))
    for record in records:
        tensor = content.tensor(0, record.iteration)
        assert record.shape == tuple(tensor.shape)
        assert_statistics(record.stats, tensor)
