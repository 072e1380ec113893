"""Catalogs and documents that somebody else made: what they claim is checked before anything works with it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd
from capd.errors import DamagedRecord, NotAStore
from capd.store.catalog.opening import DamagedCatalog, EmptyCatalog, connect_read_only
from capd.store.catalog.rows import CATALOG_NAME, read_series
from capd.store.documents.json_document import read_document
from capd.store.repair.catalog import rebuild_catalog
from capd.store.verify.run import verify_run
from tests.kit.store.damaging import edit_catalog
from tests.kit.store.writing import Writer, key

PATH = "bf16/rank0/layer0/pre/tensor.forward.input"
HUGE = 1152921504606846976
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed run with two series."""
    writer = Writer(tmp_path_factory.mktemp("sound"))
    for step in range(3):
        writer.put(key(), "float32", np.full((2, 3), step, "f4"), iteration=step)
        writer.put(key("output"), "float32", np.full((300, 300), step, "f4"), iteration=step)
    writer.close()
    return writer.run


@pytest.fixture
def run(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be changed; the second look of `capd verify` follows at once."""
    monkeypatch.setattr("capd.store.verify.run._SECOND_LOOK_S", 0.01)
    return Path(shutil.copytree(sound, tmp_path / "run.zarr"))


def catalog(run: Path) -> Path:
    return run / ".capd" / "node=n0" / CATALOG_NAME


def script(run: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(catalog(run), isolation_level=None)) as database:
        database.executescript(statements)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def found(run: Path) -> str:
    return "\n".join(map(str, verify_run(run).damaged))


@pytest.mark.parametrize(
    "shape", [[HUGE, 2, 3], [3, HUGE, 3], [-1, 2, 3], [3.0, 2, 3], [], ["3", 2, 3], [10**30, 2, 3]]
)
def test_a_shape_that_nothing_can_hold_is_damage(run: Path, shape: list[Any]) -> None:
    edit(run / PATH / "data" / "zarr.json", lambda document: document.update(shape=shape))

    assert f"{PATH}/data/zarr.json" in found(run)
    [series] = capd.open(run).find(tensor_name="input")
    assert series.numpy(2).tobytes() == np.full((2, 3), 2, "f4").tobytes()
    with pytest.raises(DamagedRecord, match=r"zarr\.json"):
        series.zarr()


@pytest.mark.parametrize(
    "member",
    [
        {"storage_transformers": -1},
        {"attributes": 3},
        {"zarr_format": 3.0},
        {"codecs": [7]},
        {"fill_value": None},
    ],
    ids=repr,
)
def test_metadata_that_no_zarr_reader_takes_are_damage(run: Path, member: dict[str, Any]) -> None:
    edit(run / PATH / "data" / "zarr.json", lambda document: document.update(member))

    assert f"{PATH}/data/zarr.json" in found(run)
    with pytest.raises(DamagedRecord, match=r"zarr\.json"):
        capd.open(run).find(tensor_name="input")[0].zarr()


@pytest.mark.parametrize("count", [HUGE, -1, 2, 4, 1.5, None, "3", 10**30])
def test_columns_that_are_not_those_of_the_records_are_damage(run: Path, count: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        document["attributes"]["capd"]["records"]["count"] = count

    edit(run / PATH / "zarr.json", change)

    assert f"{PATH}/zarr.json" in found(run)
    rebuild_catalog(run, "n0")
    assert len(capd.open(run).find(tensor_name="input")[0]) == 3


@pytest.mark.parametrize(
    "statements",
    [
        f"ALTER TABLE series RENAME TO s; CREATE VIEW series AS {ENDLESS} i AS id, x'' AS header FROM n",
        f"CREATE TRIGGER t AFTER DELETE ON meta BEGIN INSERT INTO acked {ENDLESS} i, i FROM n; END",
        "CREATE TABLE more (x)",
        "ALTER TABLE series ADD COLUMN more",
        "DROP TABLE acked",
    ],
)
def test_a_catalog_with_other_tables_is_not_asked(run: Path, statements: str) -> None:
    script(run, statements)

    with pytest.raises(DamagedCatalog, match=r"does not have the schema of capd.*--rebuild-catalog"):
        connect_read_only(catalog(run))
    assert "the catalog is damaged" in found(run)
    assert [len(series) for series in capd.open(run).series] == [3, 3]
    rebuild_catalog(run, "n0")
    assert found(run) == ""


def test_a_catalog_with_other_tables_is_built_again_when_a_daemon_opens_it(run: Path) -> None:
    script(run, f"CREATE TRIGGER t BEFORE INSERT ON meta BEGIN INSERT INTO acked {ENDLESS} i, i FROM n; END")

    Writer(run.parent).close()

    assert found(run) == ""


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("path", "'a/rank0/layer0/pre/x'"), ("quant_type", "'zzz'"), ("rank", "1"), ("tensor_name", "'zzz'"),
        ("layer", "NULL"), ("phase", "'post'"), ("layer_type", "'x'"), ("operation", "'backward'"),
        ("component", "'x'"), ("module", "x'00'"), ("stack", "'x'"), ("dtype", "'bfloat16'"),
        ("rank", "0.0"), ("sealed", "2"), ("sealed", "4"), ("max_shape", "'[2, 2]'"), ("max_shape", "'[[2]]'"),
        ("records", "2"), ("raw_bytes", "raw_bytes + 1"),
    ],
)  # fmt: skip
def test_each_column_of_a_series_is_compared_with_what_it_repeats(run: Path, column: str, value: str) -> None:
    edit_catalog(catalog(run), f"UPDATE series SET {column}={value} WHERE tensor_name='input'")  # noqa: S608

    damage = verify_run(run).damaged

    assert damage
    assert {one.kind for one in damage} == {"catalog"}
    if column in ("tensor_name", "rank"):
        assert f"table series, row 1: {column} is" in str(damage[0])
    rebuild_catalog(run, "n0")
    assert found(run) == ""


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE records SET body=changed(body, 'client', '\"0000000000000000\"')",
        "UPDATE records SET body=changed(body, 'client', '\"\\u0000\\u0000\\u0000\\u0000\\u0000\\u0000\\u0000\\u0000"
        "\\u0000\\u0000\\u0000\\u0000\\u0000\\u0000\\u0000\\u0000\"')",
        "UPDATE records SET body=changed(body, 'sequence', '77')",
        "UPDATE records SET body=changed(body, 'device', '\"cuda:0\"')",
        "UPDATE records SET body=changed(body, 'is_leaf', 'true')",
        "UPDATE records SET body=changed(body, 'attributes', '\"{}\"')",
        "UPDATE records SET record=record + 4",
        "UPDATE acked SET ranges=x'9192010b'",
    ],
)
def test_each_field_of_a_record_is_compared_with_its_commit(run: Path, statement: str) -> None:
    where = "" if "acked" in statement else " WHERE series=1 AND record=2"
    edit_catalog(catalog(run), statement + where)

    assert found(run)


def circle(path: Path) -> None:
    """Let the table `series` be eight floors of pages whose entries all lead to the one below."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        [root] = database.execute("SELECT rootpage FROM sqlite_master WHERE name='series'").fetchone()
        [size] = database.execute("PRAGMA page_size").fetchone()
    content = bytearray(path.read_bytes())
    pages = len(content) // size
    leaf = bytes(content[(root - 1) * size : root * size])
    floors = [root, *range(pages + 1, pages + 8)]
    content += bytes(7 * size) + leaf
    for page, below in zip(floors, [*floors[1:], pages + 8], strict=True):
        count = size // 8
        cells = b"".join(struct.pack(">IB", below, 1) for _ in range(count))
        begin = size - len(cells)
        pointers = struct.pack(f">{count}H", *range(begin, size, 5))
        head = struct.pack(">BHHHBI", 5, 0, count, begin, 0, below)
        body = head + pointers
        content[(page - 1) * size : page * size] = body + bytes(begin - len(body)) + cells
    content[28:32] = struct.pack(">I", len(content) // size)
    path.write_bytes(content)


def test_pages_that_lead_to_each_other_end_a_statement(run: Path) -> None:
    circle(catalog(run))

    with contextlib.closing(connect_read_only(catalog(run))) as database:
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            database.execute("SELECT SUM(records) FROM series").fetchone()
        with pytest.raises(sqlite3.DatabaseError, match="twice"):
            read_series(database)
    assert "the catalog is damaged" in found(run)
    assert [len(series) for series in capd.open(run).series] == [3, 3]


def test_a_reader_of_a_catalog_cannot_write_and_is_limited(run: Path) -> None:
    with contextlib.closing(connect_read_only(catalog(run))) as database:
        assert database.execute("PRAGMA trusted_schema").fetchone() == (0,)
        with pytest.raises(sqlite3.OperationalError, match=r"readonly|read-only"):
            database.execute("DELETE FROM meta")
        with pytest.raises(sqlite3.DatabaseError, match="too big"):
            database.execute("SELECT zeroblob(300000000)").fetchone()


def test_a_catalog_without_tables_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / CATALOG_NAME).touch()

    with pytest.raises(EmptyCatalog):
        connect_read_only(tmp_path / CATALOG_NAME)


@pytest.mark.parametrize(
    "content",
    [b"[" * 1_000_000, b'{"a": 1, "a": 2}', b'{"a": "\xff"}', b"[]", b"{", b""],
    ids=["deep", "a name twice", "no UTF-8", "a list", "cut", "empty"],
)
def test_a_document_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "zarr.json").write_bytes(content)

    with pytest.raises(NotAStore, match=r"zarr\.json"):
        read_document(tmp_path / "zarr.json")
