"""The numbers of a tensor, of layers and of scalars: equal to what the store's own reader says, from rows alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.errors import ConfigError, NoSuchSeries, NotAStore
from capd.rules.ranges import FORMAT_RANGES
from capd.store.format.statistics import merge_stats
from capd.store.read.store import open_store
from capd.web.reading import layers, lines
from capd.web.reading.catalogs import RunCatalogs, Runs
from capd.web.reading.layers import STATISTICS, layer_map
from capd.web.reading.lines import gaps, tensor_lines
from capd.web.reading.ranges import outside
from capd.web.reading.scalars import scalar_lines, scalar_names
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key
from tests.kit.store.scalars import put_scalar, write_scalars

ITERATIONS = (0, 1, 2, 3, 10, 11)
LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three layers with two micro-batches, a gap, a NaN, an attempt that is repeated, and two nodes."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(5)
    for node in ("a", "b"):
        writer = StoreWriter(root, node)
        writer.client = node.encode() * 16
        for attempt, iteration, micro, layer in _moments(node):
            values = rng.normal(size=(8, 32)) * 2.0 ** (layer + iteration)
            if (iteration, layer) == (3, 1):
                values[0, 0] = np.nan
            key = linear_key(layer=layer, module=f"m.{layer}", rank=int(node == "b"))
            moment = Moment(iteration=iteration, micro_batch=micro, attempt=attempt, time_ns=1)
            writer.put("run", key, bf16_bits(values), "bfloat16", moment)
        writer.close()
    return root


def _moments(node: str) -> Iterator[tuple[int, int, int, int]]:
    for iteration in ITERATIONS:
        for micro in (0, 1):
            for layer in LAYERS:
                yield 0, iteration, micro, layer
    if node == "a":
        yield 1, 11, 0, 0


@pytest.fixture
def run(root: Path) -> RunCatalogs:
    return Runs(root).run("run")


def expected(root: Path, path: str) -> dict[int, Any]:
    found: dict[int, list[Any]] = {}
    for record in open_store(root / "run.zarr")[path].records:
        found.setdefault(record.iteration, []).append(record.stats)
    return {iteration: merge_stats(group) for iteration, group in found.items()}


def test_the_points_are_the_merged_statistics_of_each_iteration(root: Path, run: RunCatalogs) -> None:
    for place in run.search((), {}, 0, 100).places:
        path = place.row.header.path
        found, wanted = tensor_lines(run, path), expected(root, path)
        assert found["iteration"] == list(wanted) == list(ITERATIONS)
        assert found["gap_after"] == [3]
        for name in ("count", "nan", "inf", "zero", "absmax", "min", "max"):
            assert found[name] == [getattr(one, name) for one in wanted.values()], name
        for name in ("mean", "std"):
            assert found[name] == pytest.approx([getattr(one, name) for one in wanted.values()])
        for (first, *counts), one in zip(found["exponents"], wanted.values(), strict=True):
            bins = {bin_: n for bin_, n in one.exponent_histogram.items() if 0 < bin_ < 255}
            assert {first + 127 + at: n for at, n in enumerate(counts) if n} == bins
        for label, shares in found["formats"].items():
            for at, one in enumerate(wanted.values()):
                below = outside(one, FORMAT_RANGES[label]).below
                assert shares["below"][at] == [100 * n / one.count for n in below]


def test_long_series_are_read_in_part(run: RunCatalogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_POINTS", 4)
    path = run.search((), {}, 0, 1).places[0].row.header.path
    found = tensor_lines(run, path)
    # 13 records, every fourth one.
    assert (found["step"], found["records"], found["records_read"]) == (4, 13, 4)
    assert found["iteration"] == [0, 2, 10, 11]


def test_layers_by_iteration(root: Path, run: RunCatalogs) -> None:
    found = layer_map(run, (), {"rank": 1, "tensor_name": "input"}, "absmax")
    assert found["layers"] == list(LAYERS)
    assert found["iterations"] == [[iteration, iteration] for iteration in ITERATIONS]
    for path, values in zip(found["paths"], found["values"], strict=True):
        assert values == [one.absmax for one in expected(root, path).values()]
    counted = layer_map(run, (), {"rank": 0}, "nonfinite")
    assert [sum(values) for values in counted["values"]] == [0, 2, 0]
    assert layer_map(run, ("M.2",), {}, "std")["layers"] == [2]
    assert layer_map(run, (), {"tensor_name": "none"}, "std")["layers"] == []
    with pytest.raises(ConfigError, match="absmax"):
        layer_map(run, (), {}, "median")
    for statistic in STATISTICS:
        assert len(layer_map(run, (), {"rank": 0}, statistic)["values"]) == len(LAYERS)


def test_too_many_series_of_layers_are_left_out_and_it_says_so(
    run: RunCatalogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not layer_map(run, (), {}, "absmax")["more"]
    monkeypatch.setattr(layers, "_MAX_SERIES", 3)
    found = layer_map(run, (), {}, "absmax")
    assert (found["more"], found["series"], found["layers"]) == (True, 3, [0, 1])


def test_a_search_goes_over_all_nodes_page_by_page(root: Path, run: RunCatalogs) -> None:
    everything = [series.path for series in open_store(root / "run.zarr").series]
    found = [run.search((), {}, first, 2) for first in range(0, 8, 2)]
    assert [place.row.header.path for page in found for place in page.places] == everything
    assert {page.total for page in found} == {6}
    assert [place.row.header.path for place in run.search(("RANK1", "m.2"), {}, 0, 9).places] == [
        everything[-1]
    ]
    assert run.search(("%",), {}, 0, 9).total == run.search(("m_2",), {}, 0, 9).total == 0
    assert run.search((), {"rank": 1, "layer": 0}, 0, 9).total == 1
    assert run.values()["rank"] == [0, 1]


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "none", "\0"])
def test_only_runs_below_the_store_are_found(root: Path, name: str) -> None:
    with pytest.raises(NotAStore):
        Runs(root).run(name)


def test_one_run_is_the_only_one(root: Path, tmp_path: Path) -> None:
    write_scalars(root, "other", [[1.0]], [])
    one = Runs(root / "run.zarr")
    assert one.paths() == [root / "run.zarr"]
    assert one.run("run").path == root / "run.zarr"
    with pytest.raises(NotAStore):
        one.run("other")
    with pytest.raises(NoSuchSeries):
        one.run("run").series("other")


def test_scalars_have_their_values_and_their_spread(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    values = {(0, 0): 2.0, (1, 0): 4.0, (0, 1): math.inf, (0, 5): -1.0}
    for (rank, iteration), value in values.items():
        put_scalar(writer, "run", "loss", rank, value, iteration)
    put_scalar(writer, "run", "lr", 0, 0.5, 0)
    writer.close()
    run = Runs(tmp_path).run("run")
    assert scalar_names(run) == ["loss", "lr"]
    found = scalar_lines(run, "loss")
    assert found["iteration"] == [0, 1, 5]
    assert found["mean"] == [3.0, None, -1.0]
    assert (found["min"], found["max"], found["inf"]) == ([2.0, None, -1.0], [4.0, None, -1.0], [0, 1, 0])
    assert found["ranks"] == [0, 1]
    # They are no tensors.
    assert run.search((), {}, 0, 9).total == 0


@pytest.mark.parametrize(
    ("iterations", "places"),
    [([], []), ([4], []), ([1, 2, 3], []), ([0, 10, 20, 40, 50], [2]), ([0, 1, 2, 9, 10, 90], [2, 4])],
)
def test_a_gap_is_more_than_the_usual_distance(iterations: list[int], places: list[int]) -> None:
    assert gaps(iterations) == places
