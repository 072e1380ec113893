"""Removed series: gone for every reader, accounted for, and the rest is as if they had never been captured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from capd.errors import NoSuchSeries, StoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import read_acked, read_captures
from capd.store.disk.layout import node_directory
from capd.store.disk.run_document import change_attributes
from capd.store.documents.tombstone import Tombstone
from capd.store.read.store import open_store
from capd.store.remove.series import finish, remove_series
from capd.store.repair.catalog import rebuild_catalog
from capd.store.verify.run import verify_run
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, linear_key, session_row

MARK = Tombstone("2026-11-26T19:03:00Z", "alice")


def write(root: Path, layers: int = 3, first: int = 0) -> Path:
    writer = StoreWriter(root)
    writer._sequence = first
    for step in range(4):
        for layer in range(layers):
            values = np.full((8, 8), 10 * step + layer, "f4")
            writer.put(
                "run", linear_key(layer=layer, module=f"m{layer}"), values, "float32", Moment(iteration=step)
            )
    if not first:
        writer.save_session("run", session_row(offered=4 * layers + 1, committed=4 * layers))
    writer.close()
    return root / "run.zarr"


def test_readers_do_not_find_them_and_say_when_they_were_removed(tmp_path: Path) -> None:
    run = write(tmp_path)
    path = open_store(run).find(layer=1)[0].path
    gone = remove_series(run, [path], MARK)
    store = open_store(run)

    assert (gone.records, gone.paths) == (4, (path,))
    assert [series.key.layer for series in store.series] == [0, 2]
    assert [float(series.numpy(3)[0, 0]) for series in store.series] == [30.0, 32.0]
    with pytest.raises(NoSuchSeries, match="was removed on 2026-11-26 19:03 UTC by alice"):
        store[path]
    assert [one.mark for one in store.removed] == [MARK]
    totals = store.totals()
    assert (totals.offered, totals.committed, totals.records) == (13, 12, 8)
    assert totals.offered == totals.committed + sum(totals.dropped.values()) + totals.in_flight
    # Plain readers see no hole.
    assert path not in zarr.open_group(str(run), mode="r")
    assert verify_run(run).damaged == []
    assert verify_run(run).notes == []


def test_the_catalog_equals_one_that_is_built_again(tmp_path: Path) -> None:
    run = write(tmp_path)
    remove_series(run, [open_store(run).find(layer=1)[0].path], MARK)
    catalog = node_directory(run, "node0") / "catalog.sqlite"

    def content() -> tuple[object, object]:
        database = connect_read_only(catalog)
        try:
            return read_acked(database), sorted(read_captures(database))
        finally:
            database.close()

    before = content()
    rebuild_catalog(run, "node0")
    assert content() == before
    assert len(before[1]) == 8  # type: ignore[arg-type]


def test_a_later_attempt_captures_the_series_again(tmp_path: Path) -> None:
    run = write(tmp_path)
    path = open_store(run).find(layer=1)[0].path
    remove_series(run, [path], MARK)
    write(tmp_path, first=1000)
    store = open_store(run)

    assert [len(series) for series in store.series] == [8, 4, 8]
    assert store[path].numpy(0)[0, 0] == 1.0
    assert verify_run(run).damaged == []


def test_unsealed_records_are_refused_and_nothing_is_removed(tmp_path: Path) -> None:
    run = write(tmp_path)
    path = open_store(run).series[0].path
    (node_directory(run, "node0") / "spool" / "abc.partial").write_bytes(b"x")
    with pytest.raises(StoreError, match="not sealed; seal it first"):
        remove_series(run, [path], MARK)
    assert len(open_store(run).series) == 3
    assert open_store(run).removed == []


def test_several_removals_add_up(tmp_path: Path) -> None:
    run = write(tmp_path)
    for layer in (0, 1, 2):
        remove_series(run, [open_store(run).find(layer=layer)[0].path], MARK)
    store = open_store(run)

    assert store.series == []
    assert [len(one.paths) for one in store.removed] == [1, 1, 1]
    assert len({one.entry for one in store.removed}) == 3
    assert verify_run(run).damaged == []


@pytest.mark.parametrize(
    "change",
    [
        {"entry": "../../../elsewhere"},
        {"entry": "20261126T190300Z-1/../../x"},
        {"paths": ["../../../other.zarr/a/b/c/d"]},
        {"paths": ["a/b/c/../.."]},
        {"paths": [".capd/node=node0/a/b/c"]},
        {"records": -1},
        {"at": "yesterday"},
    ],
    ids=lambda change: str(*change.values()),
)
def test_a_document_cannot_lead_a_removal_elsewhere(change: dict[str, object], tmp_path: Path) -> None:
    run = write(tmp_path, layers=1)
    other = tmp_path / "other.zarr" / "a" / "b" / "c" / "d"
    other.mkdir(parents=True)
    member = {
        "at": MARK.at, "by": "x", "entry": "20261126T190300Z-1", "records": 1, "stored_bytes": 1,
        "paths": ["a/b/c/d/e"],
    }  # fmt: skip
    change_attributes(run, lambda capd: capd.update(removing=[member | change]))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    finish(run)

    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert len(open_store(run).series) == 1
