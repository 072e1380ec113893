"""Reading while records move from the log to `.partial` files and into sealed shards under the reader's hands."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import capd
from capd.store.format.frames import FrameKind, parse_frame
from capd.store.read import spool as spool_module
from capd.store.read.node import NodeView
from tests.kit.store.damaging import image
from tests.kit.store.reading import assert_capd_reads
from tests.kit.store.writing import Writer, key
from tests.kit.tiers import rows

LARGE, SMALL, TWIN = key("large"), key("small"), key("twin")


def content(sequence: int) -> tuple[Any, np.ndarray]:
    """Key and bits of the capture with this sequence; the bits tell the sequence."""
    bits = np.random.default_rng(sequence)
    if sequence % 6 == 0:
        return LARGE, bits.standard_normal((160, 512)).astype("f4")
    if sequence % 6 == 1:
        return TWIN, np.full((300, 256), 7, "f4")
    return SMALL, bits.standard_normal((30, 100)).astype("f4")


def visible(store: capd.Store) -> set[int]:
    """Read every record that a store shows, compare it with what was captured; the sequences seen."""
    seen: set[int] = set()
    for series in store.series:
        for i, record in enumerate(series.records):
            identity, bits = content(record.iteration)
            assert identity == series.key
            assert series.numpy(i).tobytes() == bits.tobytes()
            assert series.numpy(i, slice(1, 3)).tobytes() == bits[1:3].tobytes()
            seen.add(record.iteration)
    return seen


@pytest.mark.parametrize("anew", rows([True, False], [False]), ids=["opened anew", "refreshed"])
def test_a_reader_sees_a_growing_prefix_bit_for_bit(tmp_path: Path, anew: bool) -> None:
    writer = Writer(tmp_path, shard_nbytes=1 << 20, log_nbytes=64 << 10)
    total, failures, looks = 250, [], []
    written = threading.Event()

    def read() -> None:
        store = None
        try:
            while True:
                last = written.is_set()
                if store is None or anew:
                    store = capd.open(writer.run)
                else:
                    store.refresh()
                seen = visible(store)
                assert seen == set(range(1, len(seen) + 1)), "a hole"
                looks.append(len(seen))
                if last:
                    return
        except BaseException as error:
            failures.append(error)

    def write() -> None:
        while writer.sequence < total:
            identity, bits = content(writer.sequence + 1)
            writer.put(identity, "float32", bits, iteration=writer.sequence + 1)
            if writer.sequence % 25 == 0:
                writer.flush()
                writer.pipeline.post("run", lambda store: store.maintain()).result(timeout=30)
            if writer.sequence % 80 == 0:
                writer.pipeline.seal("run").result(timeout=30)  # and the shards are continued
        writer.flush()
        written.set()

    reader = threading.Thread(target=read)
    writing = threading.Thread(target=write)
    reader.start()
    writing.start()
    writing.join(100)
    written.set()
    reader.join(100)
    writer.close()

    assert not failures, failures[0]
    assert not writer.outcomes.refusals
    assert looks == sorted(looks)
    assert looks[-1] == total
    assert_capd_reads(writer.run, writer.held)


def test_series_of_an_old_look_still_read_what_they_showed(tmp_path: Path) -> None:
    writer = Writer(tmp_path, shard_nbytes=1 << 20)
    held = {}
    for _ in range(40):
        identity, bits = content(writer.sequence + 1)
        held[writer.sequence + 1] = bits
        writer.put(identity, "float32", bits, iteration=writer.sequence + 1)
    writer.flush()
    looks = [capd.open(writer.run) for _ in range(2)]
    old = [(series, len(series)) for series in looks[0].series]
    assert any(not record.sealed for series, _ in old for record in series.records)
    writer.pipeline.seal("run").result(timeout=30)
    looks.append(capd.open(writer.run))
    assert visible(looks[2]) == set(range(1, 41))  # holds the sealed files open that are continued now
    for _ in range(40):
        identity, bits = content(writer.sequence + 1)
        writer.put(identity, "float32", bits, iteration=writer.sequence + 1)
    writer.close()

    for series, count in old:
        assert len(series) == count
        for i, record in enumerate(series.records):
            assert series.numpy(i).tobytes() == held[record.iteration].tobytes()
    assert visible(looks[1]) == set(range(1, 41))
    for store in looks[1:]:
        store.refresh()
        assert visible(store) == set(range(1, 81))


def test_a_refresh_reads_only_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path)
    read: list[int] = []
    real = os.pread

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        read.append(nbytes)
        return real(fd, nbytes, offset)

    def put(count: int) -> None:
        for _ in range(count):
            identity, bits = content(writer.sequence + 1)
            writer.put(identity, "float32", bits, iteration=writer.sequence + 1)
        writer.flush()

    def looked(store: capd.Store | None) -> capd.Store:
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pread", pread)
            if store is None:
                return capd.open(writer.run)
            store.refresh()
            return store

    put(120)
    store = looked(None)
    first = len(read)
    looked(store)
    idle = len(read)
    put(6)
    looked(store)
    writer.close()

    assert first > 240
    assert idle <= 3  # nothing was appended: a check of each file's known end
    assert idle < len(read) < first / 5


def test_a_file_that_was_cut_back_is_scanned_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for sequence in range(1, 25):
        identity, bits = content(sequence)
        writer.put(identity, "float32", bits, iteration=sequence)
    writer.flush()
    image = tmp_path / "image"
    image.mkdir()
    spool = writer.run / ".capd" / "node=n0" / "spool"
    for path in spool.iterdir():
        (image / path.name).write_bytes(path.read_bytes())
    writer.close()
    watcher = spool_module.Spool(image)
    before = watcher.read()

    for path in image.iterdir():
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * 2 // 3])
    after = watcher.read()

    assert {p: sorted(dict(s.rows())) for p, s in after.items()} == {
        p: sorted(dict(s.rows())) for p, s in spool_module.Spool(image).read().items()
    }
    assert sum(len(dict(s.rows())) for s in after.values()) < sum(
        len(dict(s.rows())) for s in before.values()
    )


def test_a_file_that_another_one_replaced_is_scanned_again(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.mkdir()
    watcher = spool_module.Spool(image)
    for first, count in (
        (300, 10),
        (400, 20),
    ):  # records of equal size: the new file's frames lie where the old's lay
        writer = Writer(tmp_path / str(first))
        for iteration in range(first, first + count):
            writer.put(SMALL, "float32", np.full((30, 100), iteration, "f4"), iteration=iteration)
        writer.flush()
        [log] = (writer.run / ".capd" / "node=n0" / "spool").glob("small-*.log")
        (image / "new").write_bytes(log.read_bytes())
        writer.close()
        (image / "new").rename(image / log.name)
        [series] = watcher.read().values()

        assert [row.moment.iteration for _, row in series.rows()] == list(range(first, first + count))


def test_a_look_at_files_that_grow_shows_no_record_before_its_predecessors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path / "live")
    keys = [key(f"k{number}") for number in range(4)]

    def put() -> None:
        for identity in keys:
            bits = np.full((300, 256), writer.sequence + 1, "f4")
            writer.put(identity, "float32", bits, iteration=writer.sequence + 1)
        writer.flush()

    put()
    copy = image(writer, tmp_path)
    put()
    spool = Path(".capd") / "node=n0" / "spool"
    later = {path.name: path.read_bytes() for path in (writer.run / spool).glob("*.partial")}
    writer.close()
    real = spool_module.opened
    order: list[str] = []

    def read(path: Path, *more: Any) -> Any:
        if path.suffix == ".partial":
            order.append(path.name)
        if len(order) > 1:  # the first file was read just before its next record came
            path.write_bytes(later[path.name])
        return real(path, *more)

    monkeypatch.setattr(spool_module, "opened", read)
    store = capd.open(copy)
    [missed] = {sequence for sequence in range(5, 9) if sequence_is_in(later[order[0]], sequence)}
    assert iterations(store) == set(range(1, missed))
    monkeypatch.undo()
    (copy / spool / order[0]).write_bytes(later[order[0]])
    store.refresh()
    assert iterations(store) == set(range(1, 9))


def sequence_is_in(partial: bytes, sequence: int) -> bool:
    """Whether a `.partial` holds the chunk of this capture of test_a_look_at_files_that_grow."""
    return any(
        frame is not None and frame.kind is FrameKind.COMMIT and frame.sequence == sequence
        for frame in (
            parse_frame(partial, at) for at in range(len(partial) - 48) if partial[at : at + 4] == b"CPDF"
        )
    )


def iterations(store: capd.Store) -> set[int]:
    """The iterations of all records that a store shows."""
    return {record.iteration for series in store.series for record in series.records}


def test_scanning_a_partial_reads_frame_headers_and_commits_alone(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for iteration in range(12):
        bits = np.random.default_rng(iteration).integers(0, 256, (2, 1 << 20), dtype=np.uint8)
        writer.put(LARGE, "uint8", bits, iteration=iteration)
    writer.flush()
    directory = writer.run / ".capd" / "node=n0"
    [partial] = (directory / "spool").glob("*.partial")
    read: list[int] = []
    real = os.pread

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        read.append(nbytes)
        return real(fd, nbytes, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", pread)
        view = NodeView(writer.run, directory)
    writer.close()

    assert next(iter(view.series.values())).records == 12
    assert partial.name not in {path.name for path in (directory / "spool").iterdir()}
    assert sum(read) < 64 << 10  # of 24 MiB
