"""The samples of SQNR: equal to `capd compare`'s numbers, spread over the records, and bounded in size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from capd.analyze.format_choice import choices
from capd.analyze.measure import errors_of
from capd.store.read.store import open_store
from capd.web import sampling
from capd.web.reading.catalogs import Runs
from capd.web.sampler import FORMATS, measured
from capd.web.sampling import MAX_RECORD_NBYTES, Samples
from capd_client.protocol.key import Moment
from tests.kit.daemon import wait_for
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = StoreWriter(tmp_path_factory.mktemp("runs"))
    for iteration in range(3):
        bits = bf16_bits(np.random.default_rng(iteration).normal(size=(64, 64)))
        writer.put("run", linear_key(), bits, "bfloat16", Moment(iteration=iteration))
        writer.put(
            "run", linear_key(tensor_name="codes"), bits.astype("u1"), "uint8", Moment(iteration=iteration)
        )
    return writer.close()


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Samples]:
    monkeypatch.setattr(sampling, "PERIOD_S", 0.01)
    found = Samples()
    yield found
    found.close()


def test_a_sample_is_what_a_comparison_says(root: Path) -> None:
    [series] = open_store(root / "run.zarr").find(tensor_name="input")
    for number in range(3):
        values = series.torch(number)
        expected = {one.label: errors_of(values, one).sqnr_db for one in choices(FORMATS)}
        assert measured(root / "run.zarr", "node0", series.path, number) == expected


def test_all_records_are_sampled_in_a_process_of_its_own(root: Path, samples: Samples) -> None:
    [place] = Runs(root).run("run").search(("input",), {}, 0, 9).places
    wait_for(lambda: samples.look(root / "run.zarr", place, 8192)["is_complete"], "three samples", 60)
    found = samples.look(root / "run.zarr", place, 8192)
    assert (found["records"], [one["number"] for one in found["samples"]]) == (3, [0, 1, 2])
    path = place.row.header.path
    assert found["samples"][1]["sqnr"] == measured(root / "run.zarr", "node0", path, 1)


def test_a_tensor_that_cannot_be_measured_says_why(root: Path, samples: Samples, tmp_path: Path) -> None:
    run = Runs(root).run("run")
    [codes] = run.search(("codes",), {}, 0, 9).places
    [place] = run.search(("input",), {}, 0, 9).places
    assert "low precision" in samples.look(run.path, codes, 1)["problem"]
    assert "16 MiB" in samples.look(run.path, place, MAX_RECORD_NBYTES + 1)["problem"]
    # The run went away after the page had listed it.
    gone = tmp_path / "gone.zarr"
    wait_for(lambda: samples.look(gone, place, 1)["problem"], "a problem", 60)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_samples_are_spread_from_the_newest_on(count: int) -> None:
    order = list(dict.fromkeys(sampling._spread(count)))
    assert sorted(order) == list(range(count))
    assert order[0] == count - 1
    first = sorted(islice(order, 9))
    assert max(np.diff(first), default=0) <= max(1, count // 7)
