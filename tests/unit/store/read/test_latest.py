"""The latest attempt of a restarted rank: its records replace earlier ones in other series of their key, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd
from capd.errors import NoSuchSeries
from tests.kit.store.writing import Writer, key

JOBS = {
    "another node": {"node": "n1"},
    "another dtype": {"dtype": "float16"},
    "another shape": {"shape": (2, 3, 4)},
    "only statistics": {"payload": False},
}


def job(root: Path, attempt: int, steps: Sequence[int], **changes: Any) -> None:
    """Write one record for each step."""
    values = {"node": "n0", "dtype": "float32", "shape": (8,), "payload": True, **changes}
    writer = Writer(root, node=values["node"])
    writer.sequence = 100 * attempt
    numpy_dtype = np.dtype(values["dtype"])
    for step in steps:
        data = np.full(values["shape"], attempt, numpy_dtype)
        put = writer.put if values["payload"] else writer.put_statistics
        put(key(), values["dtype"], data, iteration=step, attempt=attempt)
    writer.close()


def kept(run: Path, attempt: int | str = "latest") -> list[tuple[int, int]]:
    """Iteration and attempt of the records that `find` keeps."""
    return sorted(
        (record.iteration, record.attempt)
        for series in capd.open(run).find(attempt=attempt)
        for record in series.records
    )


@pytest.mark.parametrize("changes", JOBS.values(), ids=JOBS)
def test_a_restarted_rank_replaces_its_records(tmp_path: Path, changes: dict[str, Any]) -> None:
    job(tmp_path, 0, range(4))
    job(tmp_path, 1, range(2, 6), **changes)
    run = tmp_path / "run.zarr"
    assert kept(run) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert len(capd.open(run).to_pandas()) == 6
    assert len(kept(run, "all")) == 8
    assert kept(run, 0) == [(step, 0) for step in range(4)]


def test_a_series_that_a_later_attempt_replaced_is_left_out(tmp_path: Path) -> None:
    job(tmp_path, 0, range(2), dtype="float16")
    job(tmp_path, 1, range(4))
    store = capd.open(tmp_path / "run.zarr")
    assert [series.dtype for series in store.find()] == ["float32"]
    [old] = [series for series in store.series if series.dtype == "float16"]
    assert [series.path for series in store.find(path=old.path, attempt="all")] == [old.path]
    with pytest.raises(NoSuchSeries, match="only records that later attempts replaced"):
        store[old.path]


def test_steps_that_the_later_job_did_not_reach_stay_with_the_earlier_one(tmp_path: Path) -> None:
    job(tmp_path, 0, range(10))
    job(tmp_path, 1, range(8, 9))
    assert kept(tmp_path / "run.zarr") == [(step, int(step == 8)) for step in range(10)]
