"""The commands read, copy and merge a run whose shards were moved as any other, and say where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import capd as reader
from capd.store.scan.survey import moved_shards
from capd.store.verify.run import verify_run
from tests.kit.store.cli import Result
from tests.kit.store.moving import LARGE, SMALL, address_of, moved, written
from tests.kit.store.reading import assert_capd_reads
from tests.kit.store.writing import Writer, key

Capd = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Writer:
    """The writer of a run whose full shards were moved."""
    writer = written(tmp_path / "store")
    moved(writer.run, address_of(tmp_path / "remote"))
    return writer


def test_a_whole_copy_brings_the_records_back(run: Writer, tmp_path: Path, capd: Capd) -> None:
    """The copy needs no object store; its records are those of the source."""
    done = capd("cp", run.run, tmp_path / "copy.zarr", "--json")
    assert done.code == 0
    assert done.json["files"] == 0
    assert_capd_reads(tmp_path / "copy.zarr", run.held)
    report = verify_run(tmp_path / "copy.zarr")
    assert (report.ok, report.moved.total()) == (True, 0)


def test_a_copy_of_files_has_no_state_of_an_upload(tmp_path: Path, capd: Capd) -> None:
    """A copy is no second writer of the same objects: the state and the caches of the upload stay behind."""
    writer = written(tmp_path / "store")
    node = writer.run / ".capd" / "node=n0"
    (node / "remote.json").write_text("{}")
    (node / "upload").mkdir()
    (node / "upload" / "files.msgpack").write_bytes(b"")
    assert capd("cp", writer.run, tmp_path / "copy.zarr").code == 0
    left = {path.name for path in (tmp_path / "copy.zarr" / ".capd" / "node=n0").iterdir()}
    assert left == {"catalog.sqlite"}


def test_a_merge_copies_moved_series(run: Writer, tmp_path: Path, capd: Capd) -> None:
    """The merged run needs no object store either."""
    other = Writer(tmp_path / "other", run_id="other")
    other.sequence = 10_000
    other.put(key("third"), "float32", np.ones((3, 4), "f4"), iteration=0)
    other.close()
    done = capd("merge", run.run, other.run, "-o", tmp_path / "new.zarr", "--json")
    assert done.code == 0, done.err
    assert not any(moved_shards(tmp_path / "new.zarr", path) for path in (LARGE, SMALL))
    assert_capd_reads(tmp_path / "new.zarr", run.held | other.held)


@pytest.mark.parametrize(
    "command", [("show", f"{LARGE}#0"), ("export", "-o", "OUT"), ("report", "-o", "OUT"), ("ls",), ("stats",)]
)
def test_reading_commands_read_moved_records(run: Writer, tmp_path: Path, capd: Capd, command) -> None:
    """They end as for a run that is here, with the same output."""
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command]
    done = capd(words[0], run.run, *words[1:])
    assert done.code == 0, done.err


def test_a_run_equals_itself_after_its_shards_were_moved(run: Writer, tmp_path: Path, capd: Capd) -> None:
    """compare finds no difference to a copy that is here."""
    assert capd("cp", run.run, tmp_path / "copy.zarr").code == 0
    done = capd("compare", run.run, tmp_path / "copy.zarr", "--json")
    assert done.code == 0, done.err
    assert (
        reader.open(run.run)[LARGE].numpy(0).tobytes()
        == reader.open(tmp_path / "copy.zarr")[LARGE].numpy(0).tobytes()
    )


def test_verify_says_how_many_shards_are_elsewhere(run: Writer, tmp_path: Path, capd: Capd) -> None:
    """A note names the address and the command; the exit code is that of a sound run."""
    done = capd("verify", run.run)
    assert done.code == 0
    assert f"8 shards of run.zarr are at file://{tmp_path}/remote/run.zarr and were not checked" in done.err
    assert capd("verify", run.run, "--json").json["moved_shards"] == 8


def test_a_removed_run_comes_back_with_its_stubs(run: Writer, capd: Capd) -> None:
    """The trash keeps stubs like shards; the objects are left alone."""
    assert capd("rm", run.run, "--yes").code == 0
    assert not run.run.exists()
    assert capd("rm", run.run, "--restore").code == 0
    assert_capd_reads(run.run, run.held)


def test_a_rebuilt_catalog_knows_the_moved_records(run: Writer, capd: Capd) -> None:
    """verify --rebuild-catalog takes their moments from the documents, and says so."""
    done = capd("verify", run.run, "--rebuild-catalog")
    assert done.code == 0, done.err
    assert "the published moments identify their records" in done.err
    store = reader.open(run.run)
    assert [len(series) for series in store.series] == [9, 72]
    assert store[LARGE].numpy(0).tobytes() == next(iter(run.held.values()))[0][1].tobytes()
