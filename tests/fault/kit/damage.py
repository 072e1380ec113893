"""A small store in every state at once, ways to damage its files, and what capd then reads from it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import struct
from pathlib import Path

import google_crc32c
import numpy as np

import capd
from capd.errors import CapdError
from capd.store.read.series import Series
from tests.fault.kit import journals
from tests.fault.kit.journals import digest
from tests.fault.kit.load import Capture, ExpectedLog
from tests.kit.store.writing import Writer, key

__all__ = [
    "CLASSES",
    "Reading",
    "expected",
    "flip",
    "frame_head",
    "merge_wal",
    "read_all",
    "recover",
    "small_store",
]

CLASSES = {
    "shard": "*/rank*/*/*/*/data/c/*/*/*",
    "partial": ".capd/node=n/spool/*.partial",
    "log": ".capd/node=n/spool/small-*.log",
    "catalog": ".capd/node=n/catalog.sqlite",
    "wal": ".capd/node=n/catalog.sqlite-wal",
    "json": "**/zarr.json",
}
ITEMS = {"float32": np.dtype("f4"), "bfloat16": np.dtype("u2")}


def small_store(directory: Path) -> tuple[Path, Path]:
    """(store root, log of what is in it): sealed shards, two `.partial`, small records in a log, a catalog.

    As a SIGKILL leaves it: the files are copied under the hands of the writer.
    """
    (directory / "live").mkdir()
    with contextlib.closing(ExpectedLog(directory / "expected.jsonl")) as log:
        with contextlib.closing(Writer(directory / "live", node="n", log_nbytes=1 << 20)) as writer:
            _write(writer, log)
            shutil.copytree(directory / "live", directory / "store")
        return directory / "store", log.path


def _write(writer: Writer, log: ExpectedLog) -> None:
    for n in range(48):
        what = _capture(n)
        bits = np.frombuffer(what.payload, dtype=ITEMS[what.dtype]).reshape(what.shape)
        log.offer(0, n, what)
        writer.put(key(what.name), what.dtype, bits, iteration=n)
        if n == 31:
            writer.flush()
            writer.pipeline.seal("run").result(60)
    writer.flush()
    for n in range(48):
        log.ack(0, n)
    writer.pipeline.post("run", lambda store: store.flush_catalog()).result(60)


def _capture(n: int) -> Capture:
    """Every fourth one has a shard to itself and its neighbours, the others go through the small log."""
    noise = np.random.Generator(np.random.PCG64(n)).integers(0, 255, 256, dtype=np.uint8).tobytes()
    if n % 4 == 3:
        return Capture("medium", "float32", (300, 256), noise * 1200)
    return Capture("small", "bfloat16", (8, 64), noise * 4)


class Reading:
    """What one look at a damaged store gave. Every list holds rank-independent capture numbers."""

    def __init__(self) -> None:
        self.same: list[int] = []
        self.wrong: list[int] = []
        self.raised = 0
        self.unknown = 0  # a record under a name or a moment that was never offered

    def outcome(self, total: int) -> str:
        """One word: what a user would meet."""
        if self.wrong:
            return "wrong"
        if self.unknown:
            return "mislabelled"
        if self.raised:
            return "raised"
        return "identical" if len(self.same) == total else "missing"


def expected(log: Path) -> dict[tuple[str, int], str]:
    """(tensor name, number) → digest of everything offered."""
    lines = map(json.loads, log.read_text().splitlines())
    return {(line["name"], line["id"]): line["hash"] for line in lines if line["op"] == "offer"}


def read_all(run: Path, wanted: dict[tuple[str, int], str]) -> Reading:
    """Read every record of a run through capd; only capd's own errors may come."""
    found = Reading()
    try:
        for series in capd.open(run).series:
            for i in range(len(series)):
                _read_one(series, i, wanted, found)
    except CapdError:
        found.raised += 1
    return found


def _read_one(series: Series, i: int, wanted: dict[tuple[str, int], str], found: Reading) -> None:
    try:
        record = series.records[i]
        bits = np.ascontiguousarray(series.numpy(i))
    except CapdError:
        found.raised += 1
        return
    identity = series.key.tensor_name, record.iteration
    if identity not in wanted:
        found.unknown += 1
    elif wanted[identity] == digest(bits.shape, bits.tobytes()):
        found.same.append(record.iteration)
    else:
        found.wrong.append(record.iteration)


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def frame_head(kind: int, body: bytes) -> bytes:
    """A sound frame header for a payload of one's own."""
    crc = google_crc32c.value
    head = journals.FRAME.pack(b"CPDF", 1, kind, 0, len(body), 0, 0, 0, 0, crc(body), 0)[:-4]
    return head + struct.pack("<I", crc(head))


def merge_wal(run: Path) -> None:
    """Bring the catalog's rows from its write-ahead log into its main file."""
    with contextlib.closing(sqlite3.connect(run / ".capd/node=n/catalog.sqlite")) as catalog:
        catalog.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def recover(root: Path) -> None:
    """What a daemon's next start and orderly stop do, in this process."""
    Writer(root, node="n").close()
