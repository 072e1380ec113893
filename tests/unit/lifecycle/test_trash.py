"""The trash beside what others do at the same time: daemons, other commands, people with a shell."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import pytest

from capd.errors import NotAStore, StoreBusy, StoreError, StoreFull
from capd.lifecycle import checks, marks, trash
from capd.lifecycle.checks import check_place
from capd.lifecycle.inventory import look_at
from capd.lifecycle.policy import Policy
from capd.lifecycle.prune import plan_for, prune_now, still_going
from capd.lifecycle.trash import entries, finish, free, remove_run, restore, settle
from capd.store.disk.run_document import change_attributes
from capd.store.disk.run_lock import RunLock
from capd.store.documents.tombstone import Tombstone
from tests.kit.store.removing import age, files_below, small_run


def no_daemon(run: Path) -> bool:
    raise AssertionError(f"{run} is open")


def refuse(place: Path, error: Exception) -> NoReturn:
    raise error


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("original"), "run")


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A store with the runs `a` and `b`."""
    for name, days in (("a", 40), ("b", 1)):
        shutil.copytree(original, tmp_path / f"{name}.zarr")
        age(tmp_path / f"{name}.zarr", days)
    return tmp_path


def marked(run: Path, at: str = "2020-01-01T00:00:00Z") -> Path:
    change_attributes(run, lambda capd: capd.update(removed=asdict(Tombstone(at, "alice"))))
    return run


def test_freeing_a_run_with_links_leaves_their_targets(root: Path) -> None:
    inside = root / "a.zarr" / "mxfp8"
    shutil.rmtree(inside)
    inside.symlink_to(root / "b.zarr" / "mxfp8")
    before = files_below(root / "b.zarr")

    remove_run(root / "a.zarr", "alice", no_daemon)
    [entry] = entries(root)
    free(entry)
    assert entries(root) == []
    assert files_below(root / "b.zarr") == before


def test_seven_days_begin_with_the_move_and_not_with_an_old_mark(root: Path) -> None:
    """A run that somebody moved out of the trash by hand still has its mark."""
    finish(root, refuse)
    marked(root / "a.zarr")
    finish(root, refuse)

    [entry] = entries(root)
    assert (entry.name, entry.is_due(entry.removed_s + 6 * 86_400)) == ("a.zarr", False)
    assert entry.removed_s > 1.7e9


@pytest.mark.parametrize("at", ["2026-1-1T0:0:0Z", "2026-11-26", "../../x"])
def test_a_mark_of_another_form_removes_nothing(at: str, root: Path) -> None:
    marked(root / "a.zarr", at)
    finish(root, refuse)
    assert look_at(root / "a.zarr").state == "sealed"


def test_one_removal_that_cannot_be_completed_does_not_stop_the_others(root: Path) -> None:
    marked(root / "a.zarr")
    marked(root / "b.zarr")
    held = RunLock.shared(root / "a.zarr")
    failed: list[tuple[Path, Exception]] = []
    try:
        trash._PATIENCE_S, patience = 0.0, trash._PATIENCE_S
        finish(root, lambda place, error: failed.append((place, error)))
    finally:
        trash._PATIENCE_S = patience
        held.release()
    assert [(place.name, type(error)) for place, error in failed] == [("a.zarr", StoreBusy)]
    assert [entry.name for entry in entries(root)] == ["b.zarr"]


def test_a_run_that_another_command_moves_meanwhile_leaves_no_empty_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = marked(root / "a.zarr")
    alone = RunLock.alone

    def late(place: Path, patience_s: float = 0.0) -> RunLock:
        monkeypatch.setattr(RunLock, "alone", alone)
        settle(place)
        return alone(place, patience_s)

    monkeypatch.setattr(RunLock, "alone", late)
    settle(run)
    assert not run.exists()
    assert [entry.name for entry in entries(root)] == ["a.zarr"]
    restore(run)
    assert look_at(run).records == 6


def test_a_daemon_that_fills_an_empty_entry_loses_no_run_to_gc(root: Path) -> None:
    entry = trash.new_entry(root)
    [seen] = entries(root)
    (root / "a.zarr").rename(entry / "a.zarr")
    assert seen.is_due(0.0)
    free(seen)
    assert [one.name for one in entries(root)] == ["a.zarr"]


def test_a_daemon_whose_empty_entry_went_takes_another(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_entry = trash.new_entry

    def taken(place: Path) -> Path:
        monkeypatch.setattr(trash, "new_entry", new_entry)
        entry = new_entry(place)
        entry.rmdir()
        return entry

    monkeypatch.setattr(trash, "new_entry", taken)
    settle(marked(root / "a.zarr"))
    assert [one.name for one in entries(root)] == ["a.zarr"]


def test_what_no_removal_put_into_the_trash_is_left_alone(root: Path) -> None:
    remove_run(root / "a.zarr", "alice", no_daemon)
    place = root / ".capd" / "trash"
    (place / "20200101T000000Z-1" / "thesis").mkdir(parents=True)
    (place / "20200101T000000Z-2").mkdir()
    (place / "20200101T000000Z-2" / "b.zarr").symlink_to(root / "b.zarr")
    (place / "20200101T000000Z-3").symlink_to(root / "b.zarr")
    (place / "mine").mkdir()

    assert [entry.name for entry in entries(root)] == ["a.zarr"]
    with pytest.raises(NotAStore, match=r"no run c\.zarr in the trash"):
        restore(root / "c.zarr")


@pytest.mark.parametrize("kind", ["link", "file", "directory", "broken link", "run"])
def test_a_name_that_is_taken_is_not_touched_by_a_restore(kind: str, root: Path) -> None:
    run = root / "a.zarr"
    remove_run(run, "alice", no_daemon)
    make: dict[str, Callable[[], object]] = {
        "link": lambda: run.symlink_to(root / "b.zarr"),
        "broken link": lambda: run.symlink_to(root / "none"),
        "file": lambda: run.write_text("mine"),
        "directory": run.mkdir,
        "run": lambda: shutil.copytree(root / "b.zarr", run),
    }
    make[kind]()
    before = files_below(root)
    # A daemon that writes the run of this name is not waited for either.
    held = RunLock.shared(run) if kind == "run" else None
    with pytest.raises(StoreError, match="is there already; rename it"):
        restore(run)
    if held is not None:
        held.release()
    assert files_below(root) == before
    assert [entry.name for entry in entries(root)] == ["a.zarr"]

    run.rename(root / "other.zarr")
    restore(run)
    assert look_at(run).records == 6


def test_of_two_removed_runs_of_one_name_the_newer_comes_back_first(original: Path, root: Path) -> None:
    run = root / "a.zarr"
    change_attributes(run, lambda capd: capd.update(tags=["first"]))
    remove_run(run, "alice", no_daemon)
    shutil.copytree(original, run)
    change_attributes(run, lambda capd: capd.update(tags=["second"]))
    remove_run(run, "alice", no_daemon)

    for tag in ("second", "first"):
        restore(run)
        assert look_at(run).tags == (tag,)
        run.rename(root / f"{tag}.zarr")
    assert entries(root) == []


def test_a_run_with_a_mount_inside_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's table names the mount, as it does for a real one, which only root can make."""
    run = root / "a b.zarr"
    (root / "a.zarr").rename(run)
    table = root / "mountinfo"
    point = str(run / "mxfp8").replace(" ", "\\040")
    table.write_text(f"36 35 98:0 / {point} rw,noatime master:1 - ext4 /dev/sdb rw\n")
    monkeypatch.setattr(checks, "_MOUNTS", table)

    with pytest.raises(
        StoreError, match="mxfp8 is a mount inside the run, nothing removed; unmount it first"
    ):
        remove_run(run, "alice", no_daemon)
    assert look_at(run).records == 6
    assert [one.verdict.reason for one in plan_for(root, Policy(keep_last=1))] == [
        "cannot be moved",
        "one of the last 1",
    ]


@pytest.mark.parametrize("place", [".capd", ".capd/trash"])
def test_a_trash_that_is_a_link_or_elsewhere_is_refused_before_the_mark(
    place: str, root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = root / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(StoreError, match="is not a directory itself, nothing removed"):
        remove_run(root / "a.zarr", "alice", no_daemon)
    assert look_at(root / "a.zarr").state == "sealed"
    assert entries(root) == []

    link.unlink()
    link.mkdir()
    stat = Path.stat

    def elsewhere(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:])) if path == link else found

    monkeypatch.setattr(Path, "stat", elsewhere)
    with pytest.raises(StoreError, match="is on another file system than the runs, nothing removed"):
        remove_run(root / "a.zarr", "alice", no_daemon)
    assert look_at(root / "a.zarr").state == "sealed"


def test_a_name_too_long_for_the_note_is_refused_before_the_mark(root: Path) -> None:
    run = root / f"{'x' * 244}.zarr"
    (root / "a.zarr").rename(run)
    with pytest.raises(StoreError, match="nothing removed; rename it first"):
        remove_run(run, "alice", no_daemon)
    assert look_at(run).state == "sealed"
    short = root / f"{'x' * 243}.zarr"
    run.rename(short)
    remove_run(short, "alice", no_daemon)
    assert [entry.name for entry in entries(root)] == [short.name]


def test_a_link_in_place_of_a_temporary_file_leads_no_write_elsewhere(root: Path) -> None:
    victim = root / "victim"
    victim.write_text("mine")
    (root / "a.zarr" / ".capd" / "document.tmp").symlink_to(victim)
    change_attributes(root / "a.zarr", lambda capd: capd.update(pinned=True))

    assert victim.read_text() == "mine"
    assert not (root / "a.zarr" / "zarr.json").is_symlink()
    assert look_at(root / "a.zarr").is_pinned


def test_a_run_that_was_tagged_or_continued_after_the_plan_stays(original: Path, root: Path) -> None:
    shutil.copytree(original, root / "c.zarr")
    policy = Policy(keep_last=1, keep_tags=("paper",))
    planned = plan_for(root, policy)
    assert [one.verdict.keep for one in planned] == [False, False, True]
    change_attributes(root / "a.zarr", lambda capd: capd.update(tags=["paper"]))
    shutil.rmtree(root / "b.zarr")
    longer = small_run(root, "b", steps=4)
    age(longer, 1)

    failed: list[Exception] = []
    going = still_going(planned, plan_for(root, policy))
    assert [one.facts.run_id for one in going] == ["b"]
    removed = list(prune_now(root, going, "alice", no_daemon, lambda _, error: failed.append(error)))
    assert removed == []
    assert [
        str(error).endswith("was continued in the meantime, nothing removed; decide again")
        for error in failed
    ] == [True]
    assert sorted(path.stem for path in root.glob("*.zarr")) == ["a", "b", "c"]


def test_a_pin_waits_for_a_daemon_that_changes_the_document(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "_PATIENCE_S", 0.0)
    run = root / "a.zarr"
    before = files_below(run)
    with RunLock.alone(run), pytest.raises(StoreBusy, match="is being removed; try again"):
        marks.pin_run(run, pinned=True)
    assert files_below(run) == before
    # A writer does not hinder it.
    with RunLock.shared(run):
        marks.pin_run(run, pinned=True)
    assert look_at(run).is_pinned


def test_a_full_disk_is_told_with_a_way_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trash, "change_attributes", full)
    with pytest.raises(StoreFull, match=r"the disk is full.*`capd gc .* --all --yes`"):
        remove_run(root / "a.zarr", "alice", no_daemon)
    monkeypatch.undo()
    assert look_at(root / "a.zarr").state == "sealed"
    check_place(root / "a.zarr")


def test_totals_that_cannot_be_are_no_size(root: Path) -> None:
    [catalog] = (root / "a.zarr").glob(".capd/node=*/catalog.sqlite")
    with sqlite3.connect(catalog) as db:
        db.execute("UPDATE series SET stored_bytes = -5 * stored_bytes")
    db.close()
    found = look_at(root / "a.zarr")
    assert (found.state, "the totals in" in found.problem) == ("unreadable", True)
    assert json.loads((root / "a.zarr" / "zarr.json").read_text())["attributes"]["capd"]["format"] == 1
