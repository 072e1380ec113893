"""The lab's errors on the page: they are no tensors, and their numbers are those of the records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.analyze.error_sums import merged
from capd.errors import NoSuchSeries
from capd.store.read.store import open_store
from capd.web.reading.catalogs import RunCatalogs, Runs
from capd.web.reading.layers import layer_map
from capd.web.sampling import Samples
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key
from tests.kit.web.lab import LabRows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of two micro-batches, the last iteration in two attempts; one layer has no errors."""
    writer, rng = StoreWriter(tmp_path_factory.mktemp("runs")), np.random.default_rng(3)
    lab = LabRows(writer)
    for iteration, micro, attempt in ((0, 0, 0), (0, 1, 0), (5, 0, 0), (7, 0, 0), (7, 0, 1)):
        moment = Moment(iteration=iteration, micro_batch=micro, attempt=attempt)
        bits = [bf16_bits(rng.normal(size=(32, 64)) * 2.0**-iteration) for _ in range(2)]
        lab.put("run", linear_key(layer=0), bits[0], moment)
        writer.put("run", linear_key(layer=1), bits[1], "bfloat16", moment)
    return writer.close()


@pytest.fixture
def run(root: Path) -> RunCatalogs:
    return Runs(root).run("run")


@pytest.fixture
def samples() -> Iterator[Samples]:
    found = Samples()
    yield found
    found.close()


def test_rows_of_errors_are_no_tensors(run: RunCatalogs) -> None:
    everything = run.search((), {}, 0, 9)
    assert (everything.total, [place.row.holds_errors for place in everything.places]) == (2, [False] * 2)
    assert layer_map(run, (), {}, "absmax")["series"] == 2
    [errors] = run.errors(everything.places)
    assert errors.row.holds_errors
    with pytest.raises(NoSuchSeries):
        run.series(errors.row.header.path)


def test_the_numbers_are_those_of_the_records(root: Path, run: RunCatalogs, samples: Samples) -> None:
    [series] = open_store(root / "run.zarr").find(layer=0, attempt="latest")
    by_iteration: dict[int, list[Any]] = {}
    for record in open_store(root / "run.zarr").find(layer=0)[0].records:
        if (record.iteration, record.attempt) != (7, 0):
            by_iteration.setdefault(record.iteration, []).append(record.errors)
    found = samples.stored(run.path, run.errors(run.series(series.path)))
    assert (found["problem"], found["records"], found["step"]) == ("", 4, 1)
    assert found["iteration"] == [0, 5, 7]
    assert set(found["formats"]) == {"mxfp8", "hifp8"}
    for label, numbers in found["formats"].items():
        expected = [merged(one[label] for one in group) for group in by_iteration.values()]
        assert numbers["sqnr"] == [one.sqnr_db for one in expected]
        assert numbers["flushed"] == [one.flush_percent for one in expected]
        assert numbers["scale_std"] == [one.blocks and one.blocks.scale_log2_std for one in expected]


def test_a_tensor_without_errors_starts_no_process(
    run: RunCatalogs, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capd.web.sampling._started", lambda: pytest.fail("a process was started"))
    [place] = run.search((), {"layer": 1}, 0, 9).places
    assert samples.stored(run.path, run.errors([place]))["formats"] == {}


def test_a_run_that_went_away_and_a_page_that_ends_say_so(
    run: RunCatalogs, samples: Samples, tmp_path: Path
) -> None:
    places = run.errors(run.search((), {"layer": 0}, 0, 9).places)
    assert samples.stored(tmp_path / "gone.zarr", places)["formats"] == {}
    samples.close()
    assert samples.stored(run.path, places) == {"problem": "the page ends"}
