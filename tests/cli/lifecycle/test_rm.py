"""`capd rm`: dry at first, into the trash, back again, and everything that it refuses."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import capd as package
from capd.errors import RemovedRun
from tests.kit.jobs.terminal import Terminal
from tests.kit.store.cli import Result

Capd = Callable[..., Result]


@pytest.fixture
def root(store_root: Path, tmp_path: Path) -> Path:
    """A copy of the runs `first` and `second`."""
    return Path(shutil.copytree(store_root, tmp_path / "captures", copy_function=shutil.copy2))


def files_of(root: Path) -> dict[str, bytes]:
    """The files of the runs, and of nothing else."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.glob("*.zarr/**/*"))
        if path.is_file()
    }


def test_without_yes_nothing_changes(capd: Capd, root: Path) -> None:
    before = files_of(root)
    found = capd("rm", root / "first.zarr")

    assert found.code == 0
    assert "first" in found.out
    assert "nothing removed; --yes removes 1 run" in found.err
    assert files_of(root) == before
    assert not (root / ".capd" / "trash").exists()


def test_a_removed_run_is_in_the_trash_and_readers_say_so(capd: Capd, root: Path) -> None:
    done = capd("rm", root / "first.zarr", "--yes", "--json")

    assert done.code == 0
    assert [one["run"] for one in done.json["removed"]] == ["first"]
    assert not (root / "first.zarr").exists()
    assert [path.parent.name for path in root.glob(".capd/trash/*/first.zarr/zarr.json")] == ["first.zarr"]
    for command in (
        ("ls", root / "first.zarr"),
        ("show", root / "first.zarr", "x"),
        ("ls", root, "--run", "first"),
    ):
        found = capd(*command)
        assert found.code == 1
        assert re.search(r"was removed on \d{4}-\d\d-\d\d \d\d:\d\d UTC by ", found.err)
        assert "capd rm --restore" in found.err
    with pytest.raises(RemovedRun, match=r"removed on .* UTC by "):
        package.open(root / "first.zarr")
    assert [one["run"] for one in capd("runs", root, "--json").json] == ["second"]


def test_restore_brings_back_every_byte(capd: Capd, root: Path) -> None:
    before = files_of(root)
    order = [
        path.parent.name for path in sorted(root.glob("*/zarr.json"), key=lambda p: p.stat().st_mtime_ns)
    ]
    assert capd("rm", root / "first.zarr", "--yes").code == 0
    assert capd("rm", root / "first.zarr", "--restore").code == 0
    after = files_of(root)
    now = [path.parent.name for path in sorted(root.glob("*/zarr.json"), key=lambda p: p.stat().st_mtime_ns)]

    after.pop("first.zarr/.capd/lock")
    before.pop("first.zarr/.capd/lock")
    assert after == before
    assert now == order
    assert capd("verify", root / "first.zarr").code == 0
    assert list((root / ".capd" / "trash").iterdir()) == []
    assert capd("rm", root / "first.zarr", "--restore").code == 1


def test_a_new_run_of_the_name_is_not_overwritten_by_a_restore(capd: Capd, root: Path) -> None:
    assert capd("rm", root / "first.zarr", "--yes").code == 0
    shutil.copytree(root / "second.zarr", root / "first.zarr")
    found = capd("rm", root / "first.zarr", "--restore")

    assert found.code == 1
    assert "is there already" in found.err
    assert capd("ls", root / "first.zarr").code == 0


def test_no_trash_frees_at_once(capd: Capd, root: Path) -> None:
    assert capd("rm", root / "first.zarr", "--yes", "--no-trash").code == 0
    assert list((root / ".capd" / "trash").iterdir()) == []
    assert "removed on" in capd("ls", root / "first.zarr").err
    found = capd("rm", root / "first.zarr", "--restore")
    assert (found.code, "no run first.zarr in the trash" in found.err) == (1, True)


def foreign(place: Path) -> Path:
    place.mkdir()
    (place / "thesis.tex").write_text("years of work")
    return place


REFUSED = {
    "foreign directory": (lambda root: foreign(root / "thesis"), 1, "only a run of capd"),
    "foreign directory named as a run": (lambda root: foreign(root / "thesis.zarr"), 1, "only a run of capd"),
    "other zarr": (lambda root: other_zarr(root / "other.zarr"), 1, "only a run of capd"),
    "symlink": (lambda root: linked(root / "link.zarr", root / "first.zarr"), 2, "symbolic link"),
    "store root": (lambda root: root, 1, "nothing removed"),
    "symlinked root": (lambda root: linked(root.with_name("link"), root) / "first.zarr", 2, "symbolic link"),
    "missing": (lambda root: root / "none.zarr", 1, "nothing removed"),
    "file": (lambda root: a_file(root / "file.zarr"), 1, "nothing removed"),
    "newer format": (lambda root: newer(root), 1, "upgrade capd"),
}


def other_zarr(place: Path) -> Path:
    foreign(place)
    (place / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    return place


def linked(place: Path, target: Path) -> Path:
    place.symlink_to(target)
    return place


def a_file(place: Path) -> Path:
    place.write_text("x")
    return place


def newer(root: Path) -> Path:
    document = root / "first.zarr" / "zarr.json"
    document.write_text(document.read_text().replace('"format": 1', '"format": 99'))
    return root / "first.zarr"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_run_of_ones_own_is_refused_in_one_line(name: str, capd: Capd, root: Path) -> None:
    make, code, says = REFUSED[name]
    place = make(root)
    before = files_of(root)
    thesis = [path.read_text() for path in root.rglob("thesis.tex")]
    found = capd("rm", place, "--yes")

    assert (found.code, found.out) == (code, "")
    assert says in found.err
    assert len(found.err.splitlines()) == 1
    assert files_of(root) == before
    assert [path.read_text() for path in root.rglob("thesis.tex")] == thesis
    assert not (root / ".capd").exists()


def test_one_refused_run_keeps_all_of_them(capd: Capd, root: Path) -> None:
    assert capd("pin", root / "second.zarr").code == 0
    found = capd("rm", root / "first.zarr", root / "second.zarr", "--yes")

    assert found.code == 1
    assert "is pinned, nothing removed; `capd unpin" in found.err
    assert (root / "first.zarr").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_run_of_another_user_is_refused(capd: Capd, root: Path) -> None:
    os.chown(root / "first.zarr", 65534, 65534)
    found = capd("rm", root / "first.zarr", "--yes")

    assert found.code == 1
    assert "belongs to user nobody, nothing removed" in found.err
    assert (root / "first.zarr").exists()


def test_series_are_removed_by_glob(capd: Capd, root: Path) -> None:
    run = root / "second.zarr"
    everything = {row["path"] for row in capd("ls", run, "--json").json}
    glob = "*.forward.output"
    matched = {path for path in everything if path.endswith(".forward.output")}

    dry = capd("rm", run, "--series", glob)
    assert set(dry.out.split()) == matched
    assert {row["path"] for row in capd("ls", run, "--json").json} == everything

    done = capd("rm", run, "--series", glob, "--yes", "--json")
    assert done.code == 0
    assert set(done.json["series"]) == matched
    listed = capd("ls", run)
    assert {row["path"] for row in capd("ls", run, "--json").json} == everything - matched
    assert f"{len(matched)} series with" in listed.err
    assert "were removed on" in listed.err
    shown = capd("show", run, min(matched))
    assert (shown.code, "was removed on" in shown.err) == (5, True)
    assert capd("verify", run).code == 0
    assert capd("rm", run, "--series", "*.nothing", "--yes").code == 5


def test_a_terminal_is_asked_for_the_name(root: Path) -> None:
    for typed, stays in (("other\n", True), ("first\n", False)):
        with Terminal("rm", root / "first.zarr") as terminal:
            terminal.type(typed)
            shown = terminal.read_all()
            assert terminal.process.wait(60) == 0
        assert "type the name of the run (first)" in shown
        assert (root / "first.zarr").exists() == stays
