"""Compares a run with the log of what was offered and acknowledged, knowing nothing but docs/format.md.

    python -m tests.fault.check RUN EXPECTED.jsonl

Imports nothing of capd, so that one error cannot hide in both: published records are read by zarr-python,
unpublished ones by an own walk over the frames (zarr then decodes the chunks of a `.partial` as those of an
array in memory). Prints one JSON object and exits with 1 unless all of its lists are empty:

    lost          acknowledged, and not in the run
    refused       refused, and in the run nevertheless
    duplicates    in the run more than once
    wrong         in the run with other bits, another shape or other statistics than those offered
    unknown       in the run, and never offered
    holes         published, and a chunk of it is in no shard
    gaps          a series lacks a record number below its last one
    contradictions  the published columns and the journals disagree
    unreadable    something raised
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr

from tests.fault.kit.journals import EMPTY, Row, Shard, digest, read_log, read_shard
from tests.fault.kit.plain_rows import row_digest

LISTS = ("lost", "refused", "duplicates", "wrong", "unknown", "holes", "gaps", "contradictions", "unreadable")

Identity = tuple[int, str, int]  # rank, tensor name, iteration


class Series:
    """One series: its published columns and array, and the journals that hold its records."""

    def __init__(self, run: Path, path: str) -> None:
        self.directory, self.path = run / path, path
        self.attributes = json.loads((self.directory / "zarr.json").read_bytes())["attributes"]["capd"]
        self.document = json.loads((self.directory / "data" / "zarr.json").read_bytes())
        self.key = self.attributes["key"]
        self.sealed = list(filter(None, map(read_shard, self._files())))
        self.partial: list[Shard] = []
        [codec] = self.document["codecs"]
        self.chunk = tuple(codec["configuration"]["chunk_shape"])
        self.shard = tuple(self.document["chunk_grid"]["configuration"]["chunk_shape"])
        self.published = self.document["shape"][0]
        self.is_rows = self.attributes["encoding"] == "statistics"

    def crop(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What the array holds of a tensor of this shape."""
        return self.shard[1:] if self.is_rows else shape

    def digest(self, shape: tuple[int, ...], payload: bytes) -> str:
        """One word for what was kept of a tensor: its elements, or its statistics."""
        return row_digest(shape, np.frombuffer(payload)) if self.is_rows else digest(shape, payload)

    def _files(self) -> list[Path]:
        return sorted(p for p in (self.directory / "data" / "c").rglob("*") if p.is_file())

    def column(self, name: str) -> list[Any]:
        """One value per published record."""
        records = self.attributes["records"]
        if "array" in records:
            table = zarr.open_array(self.directory / records["array"], mode="r")
            names = list(table.attrs["columns"])
            body = np.asarray(table[:])
            if name != "shape":
                return [int(n) for n in body[:, names.index(name)]]
            axes = [n for n in names if n.startswith("shape_")]
            return [[int(row[names.index(a)]) for a in axes] for row in body]
        value = records.get(name, 0)
        many = value and isinstance(value, list) and (name != "shape" or isinstance(value[0], list))
        return list(value) if many else [value] * records["count"]

    def block(self, array: zarr.Array, first: int, last: int) -> np.ndarray:
        """Records first … last-1 as zarr gives them."""
        return np.asarray(array[first:last])

    def records(self, array: zarr.Array, numbers: range) -> Iterator[tuple[int, np.ndarray]]:
        """(number, uncropped record), read a few MiB at a time."""
        nbytes = max(1, prod(array.shape[1:]) * array.dtype.itemsize)
        step = max(self.chunk[0], (16 << 20) // nbytes // self.chunk[0] * self.chunk[0])
        for first in range(numbers.start, numbers.stop, step):
            block = self.block(array, first, min(first + step, numbers.stop))
            yield from enumerate(block, first)

    def chunks_of(self, number: int, shape: tuple[int, ...]) -> Iterator[int]:
        """Index entries, in its shard, of the chunks that hold an element of record `number`."""
        grid = [s // c for s, c in zip(self.shard, self.chunk, strict=True)]
        inside = number % self.shard[0] // self.chunk[0]
        used = [range(-(-n // c)) for n, c in zip(shape, self.chunk[1:], strict=True)]
        for position in itertools.product(*used):
            yield int(np.ravel_multi_index((inside, *position), grid))

    def index_of(self, shard: int) -> dict[int, tuple[int, int]]:
        """The sharding index at the end of a sealed shard."""
        file = self.directory.joinpath("data", "c", str(shard), *["0"] * (len(self.shard) - 1))
        slots = prod(s // c for s, c in zip(self.shard, self.chunk, strict=True))
        body = file.read_bytes()[-16 * slots - 4 :]
        if google_crc32c.value(body[:-4]) != struct.unpack("<I", body[-4:])[0]:
            raise ValueError(f"index of {file} fails its checksum")
        entries = struct.unpack(f"<{2 * slots}Q", body[:-4])
        return {s: entries[2 * s : 2 * s + 2] for s in range(slots) if entries[2 * s] != EMPTY}  # type: ignore[misc]

    def in_memory(self, shard: Shard) -> zarr.Array:
        """A journal as an array of its own: its bytes behind an index made from its COMMITs."""
        slots = prod(s // c for s, c in zip(self.shard, self.chunk, strict=True))
        entries = [EMPTY] * (2 * slots)
        for slot, place in shard.index.items():
            entries[2 * slot : 2 * slot + 2] = place
        body = struct.pack(f"<{2 * slots}Q", *entries)
        document = {**self.document, "shape": [max(shard.rows) + 1, *self.shard[1:]]}
        store = zarr.storage.MemoryStore()
        name = "/".join(["c", str(shard.number), *["0"] * (len(self.shard) - 1)])
        crc = struct.pack("<I", google_crc32c.value(body))
        asyncio.run(
            _fill(store, {"zarr.json": json.dumps(document).encode(), name: shard.payload + body + crc})
        )
        return zarr.open_array(store, mode="r")


async def _fill(store: zarr.storage.MemoryStore, files: dict[str, bytes]) -> None:
    for name, payload in files.items():
        await store.set(name, zarr.core.buffer.cpu.Buffer.from_bytes(payload))


class Check:
    """Everything a run holds, by identity, and what is wrong with it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.places: dict[Identity, set[tuple[str, int]]] = defaultdict(set)
        self.digests: dict[Identity, set[str]] = defaultdict(set)
        self.problems: dict[str, list[str]] = {name: [] for name in LISTS}
        self.published = self.unpublished = 0
        self._shards: dict[str, dict[int, Row]] = {}
        self._series: dict[str, Series] = {}

    def look(self) -> Check:
        """Read the whole run."""
        all_series = self._series
        for group in sorted(p.parent for p in self.run.glob("*/rank*/layer*/*/*/zarr.json")):
            path = str(group.relative_to(self.run))
            with self._noting(path):
                all_series[path] = Series(self.run, path)
        for file in sorted(self.run.glob(".capd/node=*/spool/*.partial")):
            with self._noting(file.name):
                if (shard := read_shard(file)) is not None:
                    all_series[shard.path].partial.append(shard)
        for path, series in all_series.items():
            with self._noting(path):
                self._look_at(series)
        with self._noting("small logs"):
            self._look_at_logs()
        return self

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is the finding
            self.problems["unreadable"].append(f"{what}: {type(error).__name__}: {error}")

    def _look_at(self, series: Series) -> None:
        rows: dict[int, Row] = {}
        for shard in (*series.sealed, *series.partial):
            for number, row in shard.rows.items():
                if rows.setdefault(number, row) != row:
                    self.problems["contradictions"].append(
                        f"{series.path}#{number} differs between two files"
                    )
        self._shards[series.path] = rows
        self._look_at_published(series, rows)
        for shard in (*series.sealed, *series.partial):
            numbers = [n for n in shard.rows if n >= series.published]
            if not numbers:
                continue
            array = series.in_memory(shard)
            for number, record in series.records(array, range(min(numbers), max(numbers) + 1)):
                self._found(series, number, shard.rows[number], record)
        self.unpublished += sum(n >= series.published for n in rows)
        missing = set(range(max(rows, default=-1) + 1)) - rows.keys()
        self.problems["gaps"] += [f"{series.path}#{n}" for n in sorted(missing)]

    def _look_at_published(self, series: Series, rows: dict[int, Row]) -> None:
        iterations, shapes = series.column("iteration"), series.column("shape")
        if len(iterations) < series.published:
            self.problems["contradictions"].append(
                f"{series.path}: {len(iterations)} rows, {series.published} records"
            )
        array = zarr.open_array(series.directory / "data", mode="r")
        indexes: dict[int, dict[int, tuple[int, int]]] = {}
        for number, record in series.records(array, range(min(series.published, len(iterations)))):
            row = rows.get(number)
            shape = tuple(shapes[number])
            if row is None or (row.iteration, row.shape) != (iterations[number], shape):
                self.problems["contradictions"].append(f"{series.path}#{number}: columns and journal differ")
            shard = number // series.shard[0]
            if shard not in indexes:
                indexes[shard] = series.index_of(shard)
            if not all(slot in indexes[shard] for slot in series.chunks_of(number, series.crop(shape))):
                self.problems["holes"].append(f"{series.path}#{number}")
            self._found(series, number, Row(b"", 0, shape, iterations[number]), record)
            self.published += 1

    def _look_at_logs(self) -> None:
        seen: dict[tuple[str, bytes, int], int] = {}
        for path, rows in self._shards.items():
            seen.update({(path, row.client, row.sequence): number for number, row in rows.items()})
        for file in sorted(self.run.glob(".capd/node=*/spool/small-*.log")):
            for path, number, row, raw in read_log(file):
                same = path, row.client, row.sequence
                if same not in seen:
                    seen[same] = number
                    self.unpublished += 1
                    self._holds(self._series[path], number, row, raw)

    def _found(self, series: Series, number: int, row: Row, record: np.ndarray) -> None:
        cropped = record[tuple(slice(0, n) for n in series.crop(row.shape))]
        self._holds(series, number, row, np.ascontiguousarray(cropped).tobytes())

    def _holds(self, series: Series, number: int, row: Row, payload: bytes) -> None:
        identity = series.key["rank"], series.key["tensor_name"], row.iteration
        self.places[identity].add((series.path, number))
        self.digests[identity].add(series.digest(row.shape, payload))

    def compare(self, expected: Path) -> dict[str, Any]:
        """The report: counts, and the lists of what is wrong."""
        offered: dict[Identity, set[str]] = {}
        names: dict[tuple[int, int], str] = {}
        answers: dict[str, set[Identity]] = {"ack": set(), "refuse": set()}
        for line in map(json.loads, expected.read_text().splitlines()):
            where = line["rank"], line["id"]
            if line["op"] == "offer":
                names[where] = line["name"]
                # Whose mode or policy keeps statistics, says which they are.
                offered[(where[0], line["name"], where[1])] = {line["hash"], line.get("row", line["hash"])}
            else:
                answers[line["op"]].add((where[0], names[where], where[1]))
        problems, acked = self.problems, answers["ack"]
        problems["refused"] += map(str, sorted(answers["refuse"] & self.places.keys()))
        problems["lost"] += map(str, sorted(acked - self.places.keys()))
        for identity, places in sorted(self.places.items()):
            if identity not in offered:
                problems["unknown"].append(str(identity))
            elif not self.digests[identity] <= offered[identity]:
                problems["wrong"].append(f"{identity} at {sorted(places)}")
            if len(places) > 1:
                problems["duplicates"].append(f"{identity} at {sorted(places)}")
        counts = {"offered": len(offered), "acked": len(acked), "found": len(self.places)}
        return {**counts, "published": self.published, "unpublished": self.unpublished, **problems}


def compare(run: Path, expected: Path) -> dict[str, Any]:
    """The report on a run, as `main` prints it. A run that does not exist holds nothing."""
    return Check(run).look().compare(expected)


def is_sound(report: dict[str, Any], *but: str) -> bool:
    """Whether all lists of a report, but those named, are empty."""
    return not any(report[name] for name in LISTS if name not in but)


def main() -> int:
    """Entry point; exit code 1 when anything is wrong."""
    report = compare(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(report, indent=2))
    return 0 if is_sound(report) else 1


if __name__ == "__main__":
    sys.exit(main())
