"""Small records share a chunk that is written anew whenever one joins: no older copy, and no old number, misleads."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

import capd
from capd.errors import DamagedRecord, StoreError
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk.layout import partial_path
from capd.store.format.frames import FrameKind
from capd.store.run.run_store import RunStore
from capd.store.scan.scan import ScannedLog, read_log
from capd.store.verify.run import verify_run
from tests.kit.store.damaging import (
    edit_catalog,
    flip,
    frames,
    image,
    inside,
    spool,
)
from tests.kit.store.shared_chunks import RNG, SHARED, lose_what_names_records, put_shared, sealed_shard
from tests.kit.store.writing import Writer


@pytest.fixture
def with_replaced_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards keep the chunks that later ones replaced, as where these are a small part of a shard."""
    monkeypatch.setattr("capd.store.shards.writer._WORTH_A_COPY", 0)


def lose_commit(run: Path, number: int) -> None:
    """Damage a COMMIT of the one `.partial`."""
    partial = spool(run, "*.partial")
    flip(partial, inside(frames(partial, FrameKind.COMMIT)[number]))


def assert_named_rightly(run: Path, writer: Writer, iterations: Sequence[int]) -> None:
    """These records are there, each with its own elements; others may be unreadable, never wrong."""
    [series] = capd.open(run).find(tensor_name="shared")
    held = {moment.iteration: bits.tobytes() for moment, bits in writer.held[SHARED, "float32"]}
    found = {}
    for number in range(len(series)):
        with contextlib.suppress(DamagedRecord):
            found[series.records[number].iteration] = series.numpy(number).tobytes()
    assert found == {iteration: held[iteration] for iteration in iterations}


@pytest.mark.parametrize("statistics", [True, False])
def test_a_record_whose_commit_is_lost_is_not_read_from_an_older_copy_of_its_chunk(
    tmp_path: Path, statistics: bool
) -> None:
    writer = Writer(tmp_path / "a", statistics=statistics)
    put_shared(writer, 0)
    put_shared(writer, *range(1, 10))
    put_shared(writer, 10)
    run = image(writer, tmp_path / "b")
    writer.close()
    lose_commit(run, 1)

    Writer(run.parent).close()

    assert_named_rightly(run, writer, range(11))
    assert verify_run(run).damaged == []


@pytest.mark.parametrize("chunks_too", [False, True])
def test_a_published_record_whose_commit_is_lost_is_not_read_from_an_older_copy_of_its_chunk(
    tmp_path: Path, chunks_too: bool
) -> None:
    """chunks_too: so that the `.partial` cannot be mended, and goes on as it is."""
    writer = Writer(tmp_path / "a")
    put_shared(writer, 0)
    put_shared(writer, *range(1, 10))
    put_shared(writer, *range(10, 20))
    writer.pipeline.seal("run").result(timeout=30)
    put_shared(writer, 20)
    run = image(writer, tmp_path / "b")
    writer.close()
    if chunks_too:
        for path in (
            spool(run, "*.partial"),
            *run.glob("*/rank0/layer0/pre/tensor.forward.shared/data/c/0/0/0"),
        ):
            flip(path, inside(frames(path, FrameKind.CHUNK)[2]))
    lose_commit(run, 1)

    Writer(run.parent).close()

    assert_named_rightly(run, writer, [*range(10), 20] if chunks_too else range(21))


def test_a_record_that_is_damaged_is_not_read_from_the_sealed_shard_that_its_chunk_began_in(
    tmp_path: Path,
) -> None:
    writer = Writer(tmp_path / "a")
    put_shared(writer, *range(5))
    writer.pipeline.seal("run").result(timeout=30)
    put_shared(writer, *range(5, 10))
    run = image(writer, tmp_path / "b")
    writer.close()
    partial = spool(run, "*.partial")
    flip(partial, inside(frames(partial, FrameKind.CHUNK)[-1]))
    lose_commit(run, 0)  # so that the file is mended

    Writer(run.parent).close()

    assert_named_rightly(run, writer, range(10))  # the log still has the damaged ones
    assert verify_run(run).damaged == []


def test_a_sealed_shard_without_index_and_last_commit_is_not_continued_from_an_older_copy(
    tmp_path: Path, with_replaced_chunks: None
) -> None:
    writer = Writer(tmp_path)
    put_shared(writer, *range(5))
    put_shared(writer, 5, 6)
    writer.close()
    [path] = writer.run.glob("*/rank0/layer0/pre/tensor.forward.shared/data/c/0/0/0")
    lost = frames(path, FrameKind.COMMIT)[-1].offset
    with path.open("r+b") as file:
        nbytes = path.stat().st_size - lost
        file.seek(lost)
        file.write(bytes(nbytes))

    again = Writer(tmp_path)
    again.sequence, again.held = writer.sequence, writer.held
    again.put(SHARED, "float32", RNG.standard_normal((200, 128)).astype("f4"), iteration=7)
    again.flush()
    assert not again.pipeline.close(60)  # the new one cannot join the chunk, and stays in the log

    assert_named_rightly(writer.run, writer, [*range(5), 7])


def test_a_record_that_nothing_names_keeps_its_number(tmp_path: Path, with_replaced_chunks: None) -> None:
    writer = Writer(tmp_path / "a")
    put_shared(writer, *range(3))
    put_shared(writer, 3)
    put_shared(writer, 4, 5, 6)
    writer.pipeline.seal("run").result(timeout=30)
    put_shared(writer, 7, 8)
    run = image(writer, tmp_path / "b")
    writer.close()
    flip(sealed_shard(run), inside(frames(sealed_shard(run), FrameKind.COMMIT)[1]))
    lose_commit(run, 1)
    lose_what_names_records(run)

    Writer(run.parent).close()

    assert_named_rightly(run, writer, [*range(3), *range(4, 9)])
    [series] = capd.open(run).find(tensor_name="shared")
    assert len(series.records) == 9
    assert [damage.records for damage in verify_run(run).damaged] == [(3,)]
    with pytest.raises(DamagedRecord, match="repair -o NEW"):
        series.records[3]
    with pytest.raises(DamagedRecord, match="repair -o NEW"):
        series.numpy(3)


@pytest.mark.parametrize("interrupted", [False, True])
def test_records_that_nothing_names_come_back_from_a_log_after_the_others(
    tmp_path: Path, interrupted: bool, monkeypatch: pytest.MonkeyPatch, with_replaced_chunks: None
) -> None:
    writer = Writer(tmp_path / "a", shard_nbytes=1 << 20)  # ten records
    put_shared(writer, *range(4))
    put_shared(writer, *range(4, 10))
    writer.put(SHARED, "float32", RNG.standard_normal((200, 128)).astype("f4"), iteration=10)
    writer.flush()
    writer.pipeline.post("run", RunStore.maintain).result(timeout=30)
    run = image(writer, tmp_path / "b")
    writer.close()
    flip(sealed_shard(run), inside(frames(sealed_shard(run), FrameKind.COMMIT)[0]))
    lose_what_names_records(run)
    if interrupted:
        with monkeypatch.context() as patch:
            patch.setattr("capd.store.recover.open_node.recover_partials", _stop)
            with pytest.raises(StoreError, match="stopped"):
                Writer(run.parent, shard_nbytes=1 << 20)

    Writer(run.parent, shard_nbytes=1 << 20).close()

    assert_named_rightly(run, writer, range(11))
    [series] = capd.open(run).find(tensor_name="shared")
    assert [record.iteration for record in series.records[4:]] == [*range(4, 10), *range(4), 10]
    assert {damage.records for damage in verify_run(run).damaged} == {(0, 1, 2, 3)}


def _stop(state: object) -> None:
    raise OSError(errno.EIO, "stopped")


@pytest.mark.parametrize("logs", ["kept", "lost"])
@pytest.mark.parametrize("last", [12, 24])
def test_published_records_outlast_a_torn_continuation_where_the_seals_mark_was_lost_with_the_power(
    tmp_path: Path, last: int, logs: str
) -> None:
    writer = Writer(tmp_path / "a")
    put_shared(writer, *range(10))
    writer.pipeline.seal("run").result(timeout=30)
    put_shared(writer, *range(10, last + 1))
    run = image(writer, tmp_path / "b")
    writer.close()
    partial = spool(run, f"{partial_path(Path(), 'bf16/rank0/layer0/pre/tensor.forward.shared', 0)}")
    flip(partial, inside(frames(partial, FrameKind.CHUNK)[0]))
    for log in (run / ".capd" / "node=n0" / "spool").glob("small-*.log") if logs == "lost" else ():
        log.unlink()
    catalog = run / ".capd" / "node=n0" / CATALOG_NAME
    edit_catalog(catalog, "UPDATE series SET sealing=1, sealed=0 WHERE path LIKE '%shared%'")
    edit_catalog(catalog, "UPDATE meta SET value='another' WHERE name='mounted'")

    Writer(run.parent).close()

    assert_named_rightly(run, writer, range(last + 1))
    assert verify_run(run).damaged == []


@pytest.mark.parametrize("catalog", ["kept", "lost"])
def test_a_log_gives_its_records_the_numbers_they_got_behind_damage(tmp_path: Path, catalog: str) -> None:
    writer = Writer(tmp_path / "a", statistics=False)
    put_shared(writer, 0)
    put_shared(writer, *range(1, 5))
    put_shared(writer, 5)
    run = image(writer, tmp_path / "b")
    writer.close()
    lose_commit(run, 0)  # and no log holds record 0 any more: the others close ranks
    (run / ".capd" / "node=n0" / "spool" / "small-00000000.log").unlink()

    again = Writer(run.parent, statistics=False)
    again.sequence, again.held = writer.sequence, writer.held
    mended = image(again, tmp_path / "c")
    logged = {
        (one.record, one.row.moment.iteration)
        for path in (mended / ".capd" / "node=n0" / "spool").glob("small-*.log")
        for one in (read_log(path) or ScannedLog(None)).records
        if one.header and one.header.key == SHARED
    }
    assert logged == {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)}
    if catalog == "lost":
        (mended / ".capd" / "node=n0" / CATALOG_NAME).unlink()
    assert_named_rightly(mended, writer, range(1, 6))
    put_shared(again, 6)
    twice = image(again, tmp_path / "d")
    again.close()
    lose_commit(twice, 0)

    Writer(twice.parent, statistics=False).close()

    for place in (run, twice):
        assert_named_rightly(place, writer, range(1, 7))
        assert verify_run(place).damaged == []
