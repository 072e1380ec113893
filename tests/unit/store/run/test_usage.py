"""The quotas of a run: counted to the byte, over restarts, for the run, each rank and each series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd
from capd.store.run.run_store import RunStore
from capd.store.run.usage import Quota, Use
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.scalars import scalar_key
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(3)
RECORD_NBYTES = 512 << 10
SMALL_NBYTES = 64 << 10


def writer_of(root: Path, **quota: Any) -> Writer:
    return Writer(root, codec="none", quota=Quota(**{"keeps_statistics": False, **quota}))


def put(writer: Writer, name: str = "x", nbytes: int = RECORD_NBYTES, rank: int = 0) -> str:
    """Put one record; the text of its refusal, "" if it is committed."""
    sequence = writer.put(key(name, rank=rank), "uint8", RNG.integers(0, 255, nbytes, dtype="u1"))
    writer.flush()
    refused = {at: (reason, text) for at, reason, text in writer.outcomes.refusals}
    if sequence not in refused:
        return ""
    reason, text = refused[sequence]
    assert reason is DropReason.QUOTA
    return text


def used(writer: Writer) -> dict[str, Use]:
    return {use.limit: use for use in writer.pipeline.uses("run")}


@pytest.mark.parametrize("nbytes", [RECORD_NBYTES, SMALL_NBYTES], ids=["large", "small"])
def test_a_run_holds_what_fits_to_one_record_over_restarts(tmp_path: Path, nbytes: int) -> None:
    limit = 10 * nbytes + nbytes // 2
    sequence = kept = 0
    for _ in range(4):
        writer = writer_of(tmp_path, run_max=limit)
        writer.sequence = sequence
        for _ in range(4):
            kept += put(writer, nbytes=nbytes) == ""
        sequence = writer.sequence
        held = used(writer)["run_max"].used
        writer.close()
    assert kept == 10
    assert held <= limit < held + nbytes
    assert sum(map(len, capd.open(tmp_path / "run.zarr").find(attempt="all"))) == 10


def test_ranks_and_series_have_limits_of_their_own(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, rank_max=3 * RECORD_NBYTES, series_max=2 * RECORD_NBYTES)
    # Frames take some bytes, too.
    assert put(writer, "x") == ""
    put(writer, "x")
    said = put(writer, "x")
    assert said.startswith("series_max refuses a record of 0.5 MB: bf16/rank0/")
    assert "raise CAPD_SERIES_MAX (series_max in [quota])" in said
    assert put(writer, "y") == ""
    assert put(writer, "z").startswith("rank_max refuses a record of 0.5 MB: rank 0 holds")
    assert put(writer, "z", rank=1) == ""
    assert used(writer)["rank_max"].of == "rank 0"
    writer.close()


def test_a_refused_record_leaves_no_series(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, run_max=1000)
    assert put(writer) != ""
    assert not list(writer.run.glob("*/rank*"))
    writer.close()


def test_near_the_limit_only_statistics_are_kept_and_scalars_stay_whole(tmp_path: Path) -> None:
    limit = 10 * RECORD_NBYTES
    writer = Writer(tmp_path, codec="none", quota=Quota(run_max=limit))
    for _ in range(12):
        writer.put(key("x"), "float32", RNG.standard_normal(RECORD_NBYTES // 4).astype("f4"))
        writer.flush()
    writer.put(scalar_key("loss", 0), "float64", np.array(2.5))
    writer.flush()
    assert writer.outcomes.refusals == []
    writer.close()
    kept = {series.kept: len(series) for series in capd.open(writer.run).find()}
    assert kept == {"tensor": 9, "statistics": 3}
    [statistics] = [s for s in capd.open(writer.run).find() if s.kept == "statistics"]
    assert statistics.records[0].stats.count == RECORD_NBYTES // 4
    assert capd.open(writer.run).scalar("loss").values.tolist() == [2.5]


def kept_by(writer: Writer) -> dict[str, int]:
    return {series.kept: len(series) for series in capd.open(writer.run).find()}


def random_floats(nbytes: int) -> Any:
    return RNG.standard_normal(nbytes // 4).astype("f4")


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (RECORD_NBYTES - 1000, {"statistics": 3}),
        # Two records are less than 90 %, and a third does not fit.
        (RECORD_NBYTES * 5 // 2, {"tensor": 2, "statistics": 1}),
    ],
    ids=["smaller than a record", "a rest smaller than a record"],
)
def test_a_record_that_does_not_fit_leaves_its_statistics(
    tmp_path: Path, limit: int, kept: dict[str, int]
) -> None:
    writer = Writer(tmp_path, codec="none", quota=Quota(run_max=limit))
    for _ in range(3):
        writer.put(key("x"), "float32", random_floats(RECORD_NBYTES))
        writer.flush()
    assert writer.outcomes.refusals == []
    writer.close()
    assert kept_by(writer) == kept


def test_records_of_one_write_count_each_other(tmp_path: Path) -> None:
    writer = Writer(tmp_path, codec="none", quota=Quota(run_max=20 * SMALL_NBYTES))
    found: list[list[bool]] = []

    def ask(store: RunStore) -> None:
        plan = store.plan(key("x"), "uint8", {}, (SMALL_NBYTES,), b"")
        found.append(store.usage.near([(plan, SMALL_NBYTES)] * 30))

    writer.pipeline.post("run", ask).result(timeout=30)
    writer.close()
    # 18 of 20 are 90 %.
    assert found == [[False] * 18 + [True] * 12]


@pytest.mark.parametrize(
    ("nbytes", "count"), [(RECORD_NBYTES, 24), (SMALL_NBYTES, 200)], ids=["large", "small"]
)
def test_records_that_come_together_at_the_edge_leave_their_statistics(
    tmp_path: Path, nbytes: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They are planned before the first of them is stored, so the plan alone cannot tell."""
    writer = Writer(tmp_path, codec="none", quota=Quota(run_max=8 << 20))
    for at in range(count):
        writer.put(key("x"), "float32", random_floats(nbytes), iteration=at)
    writer.flush()
    assert writer.outcomes.refusals == []
    assert used(writer)["run_max"].used <= 8 << 20
    writer.close()
    kept = kept_by(writer)
    assert kept["tensor"] + kept["statistics"] == count
    assert kept["tensor"] * nbytes >= 0.8 * (8 << 20)
    assert "are dropped" not in caplog.text
