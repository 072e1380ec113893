"""How users reach series and records: by index, by path, by glob, in loops; and what they hear where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.errors import CapdError, ConfigError, DamagedRecord, NoSuchRecord, NoSuchSeries
from capd.store.format.frames import RecordRow
from capd.store.read.rows import SeriesRows
from tests.kit.store.writing import Writer, key

PATH = "bf16/rank0/layer0/pre/layers.0.q_proj.forward.input"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = Writer(tmp_path)
    for layer in range(2):
        for name, operation in (("input", "forward"), ("weight", "forward"), ("grad_output", "backward")):
            one = key(
                name, layer=layer, module=f"layers.{layer}.q_proj", operation=operation, component="linear"
            )
            for iteration in range(6):
                writer.put(one, "float32", np.full((2, 3), iteration, "f4"), iteration=iteration)
    writer.close()
    return writer.run


def test_a_series_is_a_sequence_of_its_records(run: Path) -> None:
    series = capd.open(run)[PATH]

    assert len(series) == 6
    assert [record.iteration for record in series] == [0, 1, 2, 3, 4, 5]
    assert series[-1].iteration == 5
    assert [record.iteration for record in series[1:3]] == [1, 2]
    assert series[4].values().tolist() == series[4].numpy().tolist() == [[4.0] * 3] * 2
    assert series[4].numpy((0, slice(2))).tolist() == [4.0] * 2


def test_a_record_that_is_not_there_is_named_with_the_number_of_those_that_are(run: Path) -> None:
    series = capd.open(run)[PATH]

    for read in (series.numpy, series.values, series.__getitem__, series.records.__getitem__):
        with pytest.raises(
            NoSuchRecord, match=re.escape(f"{PATH}: there is no record 99 of 6; the last is 5")
        ):
            read(99)
    with pytest.raises(IndexError):
        series[-7]


def test_a_store_is_reached_by_path_and_by_glob(run: Path) -> None:
    store = capd.open(run)

    assert store[PATH].path == PATH
    inputs = store["*q_proj.forward.input"]
    assert [series.key.layer for series in inputs] == [0, 1]
    assert [series.path for series in store.find(path="*layer0*weight")] == [PATH.replace("input", "weight")]
    assert [series.path for series in store] == [series.path for series in store.series]
    assert len([*store]) == 6
    assert PATH in store
    assert "nothing" not in store
    with pytest.raises(ConfigError, match="by a path or a glob, not by int"):
        store[0]
    assert store["*nothing*"] == []


def test_a_path_that_is_not_there_is_answered_with_similar_ones(run: Path) -> None:
    with pytest.raises(NoSuchSeries, match=re.escape(f"did you mean {PATH}")) as caught:
        capd.open(run)["bf16/rank0/layer0/pre/layers.0.q_pro.forward.input"]
    assert isinstance(caught.value, (CapdError, KeyError))
    assert str(caught.value).startswith(f"{run} has no series")


def test_find_takes_globs_beside_values(run: Path) -> None:
    store = capd.open(run)

    assert len(store.find(module="*.q_proj")) == 6
    assert len(store.find(module="layers.1.*", tensor_name=["weight", "grad_*"])) == 2
    assert len(store.find(tensor_name="i?put", layer=0)) == 1
    with pytest.raises(CapdError, match="unknown key field 'modul'; known: path, quant_type"):
        store.find(modul="x")


def test_dir_names_what_the_package_has() -> None:
    assert {"open", "merge_stats", "__version__"} <= set(dir(capd))
    assert all(hasattr(capd, name) for name in dir(capd))


def test_notebooks_show_keys_statistics_and_a_histogram_without_reading_elements(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd.store.read.series import Series

    monkeypatch.setattr(Series, "read", None)
    store = capd.open(run)

    of_store, of_series, of_record = (one._repr_html_() for one in (store, store[PATH], store[PATH][5]))

    assert "6 series, 36 records" in of_store
    assert PATH in of_store
    for text in ("<td style", "layers.0.q_proj", "float32", "<svg role", "Exponents from 2^0 … 2^2"):
        assert text in of_series
    assert "#5" in of_record
    assert "<svg" in of_record
    assert "series" in store["*input"]._repr_html_()


def test_names_from_outside_are_text_in_html(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.put(key("x", module="<script>alert(1)</script>"), "float32", np.ones(3, "f4"))
    writer.close()
    store = capd.open(writer.run)

    for one in (store, store.series[0], store.series[0][0]):
        assert "<script>" not in one._repr_html_()


def test_notebooks_show_a_series_with_damaged_records(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = SeriesRows.row

    def lost(rows: SeriesRows, number: int) -> RecordRow:
        if number == 2:
            raise DamagedRecord("neither catalog nor frames know it")
        return row(rows, number)

    monkeypatch.setattr(SeriesRows, "row", lost)
    shown = capd.open(run)[PATH]._repr_html_()

    assert "1 records are damaged" in shown
    assert "<svg role" in shown
