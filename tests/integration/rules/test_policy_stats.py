"""Policy stats on a real training loop with a real daemon: what has no room leaves its statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import capd as capd_package
from capd.store.format.statistics import public, summarise
from tests.kit.jobs.modes import same_bits, train
from tests.kit.processes import Daemon, capd


@pytest.mark.slow
def test_what_has_no_room_leaves_its_statistics(daemon: Daemon, tmp_path: Path) -> None:
    held = train(
        tmp_path / "on.pt",
        CAPD_ENDPOINT=daemon.endpoint,
        CAPD_RUN_ID="run",
        CAPD_POLICY="stats",
        CAPD_ARENA_BYTES=str(8 << 20),
        CAPD_MAX_MB_PER_STEP="0.005",
    )
    plain = train(tmp_path / "off.pt")

    found = {}
    for series in capd_package.open(daemon.store / "run.zarr").series:
        for i, record in enumerate(series.records):
            at = (series.key.module, series.key.tensor_name, record.iteration, record.micro_batch)
            assert at not in found
            found[at] = series.kept
            tensor = held["operands"][at]
            if series.kept == "tensor":
                assert same_bits(series.torch(i), tensor)
            stats = public(summarise(tensor.contiguous().numpy(), "float32"))
            assert record.stats.exponent_histogram == stats.exponent_histogram
            assert (record.stats.min, record.stats.max, record.shape) == (
                stats.min,
                stats.max,
                tuple(tensor.shape),
            )
            assert abs(record.stats.sum - stats.sum) <= 1e-12 * tensor.abs().sum().item()
    reduced = sum(kept == "statistics" for kept in found.values())
    assert 0 < reduced < len(found)
    assert held["counters"]["dropped"] == {}
    assert held["counters"]["offered"] == held["counters"]["committed"] == len(found)
    assert held["losses"] == plain["losses"]

    assert counted(daemon, reduced, len(found)) == "daemon"
    daemon.stop()
    assert counted(daemon, reduced, len(found)) == "store"
    table = capd("ls", str(daemon.store / "run.zarr"), "--by", "kept").stdout
    assert any(
        line.split()[0] == "statistics" and str(reduced) in line.split() for line in table.splitlines()
    )


def counted(daemon: Daemon, reduced: int, records: int) -> str:
    """Check that `capd stats` tells how many records are statistics alone; who told it."""
    arguments = ("stats", str(daemon.store))
    shown = capd(*arguments, CAPD_ENDPOINT=daemon.endpoint).stdout
    assert f"statistics  {reduced} of {records} records keep nothing else" in shown
    counters = json.loads(capd(*arguments, "--json", CAPD_ENDPOINT=daemon.endpoint).stdout)
    assert (counters["statistics_records"], counters["records"]) == (reduced, records)
    return str(counters["source"])
