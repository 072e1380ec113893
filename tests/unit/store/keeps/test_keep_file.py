"""The file of keeps: torn tails, hostile lines, a link at its place; and whose files of the recorder a copy has."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from capd.errors import StoreError
from capd.store.keeps import held_files
from capd.store.keeps.file import (
    distinct_keeps,
    keeps_path,
    parse_keeps,
    read_keeps,
    whole_keep_lines,
    write_keeps,
)
from capd.store.keeps.held_files import (
    discard_held,
    elsewhere_of,
    is_of_daemons,
    left_segments,
    note_elsewhere,
    window_directory,
    window_nbytes,
)
from capd.store.keeps.keep import MAX_LINE_NBYTES, keep_line, keep_of
from tests.kit.store.keeping import give_keeps, keep, leave_held


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.zarr" / ".capd" / "node=node0").mkdir(parents=True)
    return tmp_path / "run.zarr"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(held_files, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def test_keeps_are_read_as_they_were_written(run: Path) -> None:
    written = [keep(3), keep(9, reason="ü\n/", node="other")]
    write_keeps(run, {"node0": written, "nobody": [keep(1)], "empty": []})

    assert read_keeps(keeps_path(run, "node0")).items == written
    assert [path.name for path in (run / ".capd").iterdir()] == ["node=node0"]
    assert oct(keeps_path(run, "node0").stat().st_mode & 0o777) == "0o600"
    assert oct(keeps_path(run, "node0").parent.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_tail_is_left_out(run: Path, cut: int) -> None:
    give_keeps(run, "node0", keep(1), keep(2))
    path = keeps_path(run, "node0")
    os.truncate(path, path.stat().st_size - cut)

    found = read_keeps(path)
    assert (found.items, found.damaged) == ([keep(1)], ())
    assert found.torn_nbytes == len(keep_line(keep(2))) - cut
    assert whole_keep_lines(path) == keep_line(keep(1))


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{}", b"null", b"[" * 4000, b"\0" * 40, b"x" * (MAX_LINE_NBYTES + 1),
        keep_line(keep(1)).replace(b'"attempt":0', b'"attempt":-1')[:-1],
        keep_line(keep(1)).replace(b'"attempt":0', b'"attempt":' + b"9" * 400)[:-1],
        keep_line(keep(5, first=6))[:-1], keep_line(keep(5, last=4))[:-1],
        keep_line(keep(1, reason="x" * 501))[:-1], keep_line(keep(1, reason="\U0001f600" * 1500))[:-1],
    ],
)  # fmt: skip
def test_a_hostile_line_is_no_keep(line: bytes) -> None:
    assert keep_of(line) is None
    assert parse_keeps(keep_line(keep(1)) + line + b"\n").damaged == (len(keep_line(keep(1))),)


@pytest.mark.timeout(30)
def test_what_is_no_regular_file_is_not_read(run: Path, tmp_path: Path) -> None:
    path = keeps_path(run, "node0")
    path.parent.mkdir()
    assert read_keeps(path).items == []
    os.mkfifo(path)
    with pytest.raises(StoreError, match="not a regular file"):
        read_keeps(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        read_keeps(path)


def test_a_keep_that_several_nodes_noted_comes_once() -> None:
    assert distinct_keeps([keep(4), keep(2), keep(4), keep(3, node="b")]) == [
        keep(2),
        keep(3, node="b"),
        keep(4),
    ]


def test_the_spool_of_a_run_is_found_in_memory_and_on_disk(run: Path, memory: Path) -> None:
    give_keeps(run, "node0", keep(1))
    leave_held(run, "node0", 7, 100, in_memory=True)
    leave_held(run, "node0", 8, 50)
    keeps_path(run, "node0").with_name("other.held").touch()
    found = {(one.iteration, one.nbytes, one.in_memory) for one in left_segments(run, "node0")}

    assert found == {(7, 100, True), (8, 50, False)}
    assert list(left_segments(run, "other")) == []
    assert window_nbytes(run, "node0") == 50 + len(keep_line(keep(1)))

    discard_held(run)
    assert [one.iteration for one in left_segments(run, "node0")] == [8]
    assert list(memory.rglob("*.held")) == []


def test_a_directory_that_others_may_write_to_is_not_believed(run: Path, memory: Path) -> None:
    place = leave_held(run, "node0", 7, 100, in_memory=True)
    place.parents[2].chmod(0o777)

    assert list(left_segments(run, "node0")) == []
    discard_held(run)
    assert place.exists()


def test_the_spool_of_a_run_is_found_in_a_directory_of_its_own(run: Path, memory: Path) -> None:
    note_elsewhere(run, "node0", memory.parent / "nvme")
    place = leave_held(run, "node0", 7, 100, elsewhere=memory.parent / "nvme")
    other = place.with_name("notes.txt")
    other.touch()

    assert [(one.path, one.in_memory) for one in left_segments(run, "node0")] == [(place, False)]
    discard_held(run)
    assert (place.exists(), other.exists()) == (False, True)
    other.unlink()
    discard_held(run)
    assert list((memory.parent / "nvme").iterdir()) == []


def test_a_directory_that_a_note_invents_is_not_believed(run: Path, memory: Path) -> None:
    """The note of a run may come from anybody."""
    place = leave_held(run, "node0", 7, 100, elsewhere=memory.parent / "nvme")
    note = window_directory(run, "node0") / "elsewhere"
    note.parent.mkdir(mode=0o700)
    for text in (b"", b"nvme", b"../nvme", b"\0", os.fsencode(place.parent), os.fsencode(place.parents[1])):
        note.write_bytes(text)
        assert list(left_segments(run, "node0")) == [], text
        discard_held(run)
    note.unlink()
    note.symlink_to(memory.parent / "other")
    (memory.parent / "other").write_bytes(os.fsencode(memory.parent / "nvme"))
    assert elsewhere_of(run, "node0") is None
    note.unlink()
    os.mkfifo(note)
    assert elsewhere_of(run, "node0") is None
    note.unlink()
    note_elsewhere(run, "node0", memory.parent / "nvme")
    place.parents[1].chmod(0o777)
    assert list(left_segments(run, "node0")) == []
    discard_held(run)
    assert place.exists()


@pytest.mark.parametrize(
    ("path", "belongs"),
    [
        (".capd/node=n/window/a0-i1-000000.held", True), (".capd/node=n/window/let-go.txt", True),
        (".capd/node=n/window/elsewhere", True),
        (".capd/keeps/0-7-n.json", True), (".capd/node=n/window/keeps.jsonl", False), (".capd/lock", False),
        (".capd/node=n/spool/x.log", False), ("bf16/rank0/layer0/window/keeps.jsonl", False), ("zarr.json", False),
    ],
)  # fmt: skip
def test_a_copy_has_the_keeps_and_nothing_else_of_the_recorder(path: str, belongs: bool) -> None:
    assert is_of_daemons(PurePosixPath(path)) == belongs
