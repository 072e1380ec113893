"""Small stores, and what somebody may have made of their documents and catalogs."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from capd.store.catalog.rows import LedgerRow, SessionRow
from capd.store.format import columns
from tests.kit.store.damaging import image
from tests.kit.store.writing import CLIENT, Writer, key

__all__ = ["BASES", "DEEP", "GONE", "SCRIPTS", "TABLES", "TEXTS", "Change", "build", "change"]

Change = tuple[Any, ...]
BASES = ("sealed", "killed")
DEEP, GONE = "@DEEP@", "@GONE@"
_DEPTH = 900  # just what json reads
_MAX_NBYTES = 1 << 20  # of a file that is changed: a second change may meet a device, or what is huge already
_MAX_STEPS = 1_000_000  # of a change in a catalog: it may meet a view without end
TABLES = {
    "meta": ("name", "value"),
    "series": (
        "id", "path", "quant_type", "rank", "tensor_name", "layer", "phase", "module", "dtype", "header", "records",
        "sealed", "sealing", "max_shape", "raw_bytes", "stored_bytes",
    ),
    "records": ("series", "record", "attempt", "stored_nbytes", "body"),
    "acked": ("client", "ranges"),
    "sessions": ("client", "body"),
}  # fmt: skip
_BLOBS = {"series": "header", "records": "body", "acked": "ranges", "sessions": "body"}
_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT"
_ALL = ", ".join(f"i AS {name}" for name in TABLES["series"])
SCRIPTS = (
    f"ALTER TABLE series RENAME TO s; CREATE VIEW series AS {_ENDLESS} {_ALL} FROM n",
    f"ALTER TABLE records RENAME TO r; CREATE VIEW records AS {_ENDLESS} 1 AS series, i AS record FROM n",
    f"CREATE TRIGGER t AFTER DELETE ON meta BEGIN INSERT INTO acked {_ENDLESS} i, i FROM n; END",
    "CREATE TRIGGER t BEFORE UPDATE ON series BEGIN DELETE FROM records; END",
    "CREATE TABLE more (x)",
    "CREATE INDEX i ON records (attempt)",
    "CREATE VIRTUAL TABLE v USING fts5(x)",
    "DROP TABLE records",
    "DROP TABLE meta",
    "DROP TABLE acked; CREATE TABLE acked (client, ranges)",
    "ALTER TABLE series ADD COLUMN more",
    "ALTER TABLE records RENAME COLUMN body TO text",
    "DELETE FROM records",
    "DELETE FROM series WHERE id = 1",
    "DELETE FROM acked",
    "DELETE FROM meta",
    "DELETE FROM records WHERE record = 1",
    "CREATE TEMP TABLE t AS SELECT * FROM series; UPDATE t SET id = id + 10, path = path || 'x'; "
    "INSERT INTO series SELECT * FROM t",
    "INSERT INTO records SELECT series, record + 4611686018427387904, attempt, stored_nbytes, body FROM records",
    "INSERT INTO records SELECT series + 77, record, attempt, stored_nbytes, body FROM records",
    "UPDATE series SET tensor_name = 'zzz'",
    "UPDATE series SET records = 1152921504606846976, sealed = 1152921504606846976",
    "PRAGMA user_version = 0",
    "PRAGMA user_version = 99",
    "PRAGMA journal_mode = WAL; UPDATE series SET records = 1",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 3",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 1000000",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE x(' || printf('%.*c', 90000, '(')",
)  # fmt: skip


def build(root: Path) -> dict[str, Path]:
    """The stores that are changed: one sealed, one as a kill left it. Some series have a `moments` array."""
    with patch.object(columns, "MAX_INLINE", 4):  # a long series, without 10,000 records
        sealed = Writer(root / "first")
        _fill(sealed)
        sealed.close()
        killed = Writer(root / "second")
        _fill(killed)
        killed.flush()
        image(killed, root / "killed")
        killed.close()
    return {"sealed": sealed.run, "killed": root / "killed" / "run.zarr"}


def _fill(writer: Writer) -> None:
    numbers = np.random.default_rng(0)
    for step in range(6):
        small = numbers.standard_normal((3, 1 + step % 4)).astype("f4")
        writer.put(key("input"), "float32", small, iteration=step)
        if step < 3:
            bits = numbers.integers(0, 2**15, (4, 8), dtype=np.uint16)
            writer.put(key("weight", module="layers.0.linear"), "bfloat16", bits, iteration=step)
    for step in range(2):
        writer.put(key("output"), "float32", numbers.standard_normal((260, 300)).astype("f4"), iteration=step)
    drops = [LedgerRow(key("input"), "float32", "ring_full", 3, 72, 0, 2)]
    session = SessionRow(CLIENT, 0, 0, "host", 1, 10**18, None, "live", 12, 9, 0, {"ring_full": 3}, drops)
    writer.pipeline.save_session(writer.run_id, session).result(timeout=60)
    writer.put_statistics(key("grad_output"), "float32", small, iteration=0)


def change(run: Path, changes: list[Change]) -> None:
    """Make the changes in a run; what a store does not have cannot be changed."""
    with contextlib.suppress(sqlite3.Error, OSError, LookupError, ValueError, ArithmeticError):
        for kind, *what in changes:
            _KINDS[kind](run, *what)


def _content(path: Path) -> bytes:
    """What a file holds; an OSError where a change before has left something that can hardly be read."""
    if not path.is_file() or path.stat().st_size > _MAX_NBYTES:
        raise OSError(f"{path} is nothing to change")
    return path.read_bytes()


def documents(run: Path) -> list[Path]:
    """All documents of a run."""
    return sorted(run.rglob("zarr.json"))


def catalog(run: Path) -> Path:
    """The catalog of the only node."""
    return run / ".capd" / "node=n0" / "catalog.sqlite"


def _json(run: Path, document: int, place: int, value: Any) -> None:
    paths = documents(run)
    path = paths[document % len(paths)]
    content = json.loads(_content(path))
    path.write_text(_text(_replaced(content, place, value)), errors="surrogatepass")


def _text(content: Any) -> str:
    return json.dumps(content).replace(f'"{DEEP}"', "[" * _DEPTH + "]" * _DEPTH)


def _replaced(content: Any, place: int, value: Any) -> Any:
    """The content with another value in one of its places, or without it."""
    places = list(_places(content))
    holder, name = places[place % len(places)]
    if value == GONE:
        del holder[name]
    else:
        holder[name] = value
    return content


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    for name in list(content) if isinstance(content, dict) else range(len(content)):
        yield content, name
        if isinstance(content[name], (dict, list)):
            yield from _places(content[name])


def _truncated(path: Path) -> None:
    path.write_bytes(_content(path)[:-9])


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(target: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return make


def _huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


def _rewritten(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(edit(_content(path)))

    return make


TEXTS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": _rewritten(lambda _: b""),
    "truncated": _truncated,
    "no UTF-8": _rewritten(lambda text: text[:-1] + b', "x": "\xff\xfe"}'),
    "UTF-16": _rewritten(lambda text: text.decode().encode("utf-16")),
    "a name twice": _rewritten(lambda text: text.replace(b"{", b'{"shape": [1], "shape": [2], ', 1)),
    "a list": _rewritten(lambda text: b"[" + text + b"]"),
    "NaN": _rewritten(lambda _: b"NaN"),
    "a pipe": _pipe,
    "a directory": _directory,
    "a link to itself": _link("zarr.json"),
    "a link to nothing": _link("nothing"),
    "a link to /dev/zero": _link("/dev/zero"),
    "huge": _huge,
    "deep": _rewritten(lambda _: b"[" * 1_000_000),
}


def _document_file(run: Path, document: int, how: str) -> None:
    paths = documents(run)
    TEXTS[how](paths[document % len(paths)])


def _catalog_file(run: Path, suffix: str, how: str) -> None:
    path = catalog(run).with_name(catalog(run).name + suffix)
    path.touch()
    TEXTS[how](path)


def _bytes(run: Path, offset: int, value: int) -> None:
    path = catalog(run)
    content = bytearray(_content(path))
    content[offset % len(content)] = value
    path.write_bytes(content)


@contextlib.contextmanager
def _opened(run: Path) -> Iterator[sqlite3.Connection]:
    path = catalog(run)
    for beside in path.parent.glob(f"{path.name}*"):
        _content(beside)  # SQLite would wait for the other end of a pipe
    db = sqlite3.connect(path, isolation_level=None)
    db.set_progress_handler(lambda: 1, _MAX_STEPS)
    try:
        yield db
    finally:
        db.close()


def _script(run: Path, number: int) -> None:
    with _opened(run) as db:
        db.executescript(SCRIPTS[number % len(SCRIPTS)])


def _cell(run: Path, table: str, column: str, row: int, value: Any) -> None:
    with _opened(run) as db:
        _update(db, table, column, row, lambda _: value)


def _blob(run: Path, table: str, row: int, place: int, value: Any) -> None:
    with _opened(run) as db:
        _update(
            db, table, _BLOBS[table], row, lambda body: _packed(msgspec.msgpack.decode(body), place, value)
        )


def _packed(content: Any, place: int, value: Any) -> bytes:
    packed = msgspec.msgpack.encode(_replaced(content, place, value))
    return packed.replace(msgspec.msgpack.encode(DEEP), b"\x91" * _DEPTH + b"\x90")


def _update(db: sqlite3.Connection, table: str, column: str, row: int, new: Callable[[Any], Any]) -> None:
    """Let `new` make another value of a cell; rows are counted by the primary key."""
    names = TABLES[table][: 2 if table == "records" else 1]
    rows = db.execute(f"SELECT {column}, {', '.join(names)} FROM {table}").fetchall()  # noqa: S608 - constants
    old, *found = rows[row % len(rows)]
    where = " AND ".join(f"{name} IS ?" for name in names)
    db.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (new(old), *found))  # noqa: S608


_KINDS: dict[str, Callable[..., None]] = {
    "json": _json,
    "document": _document_file,
    "catalog": _catalog_file,
    "byte": _bytes,
    "script": _script,
    "cell": _cell,
    "blob": _blob,
}
