"""Removals that a kill interrupts: nothing is lost but what was named, and a second call completes.

Each row kills the command at one failpoint. Then readers see a whole run or a removed one, a daemon may come, and the
same command done again ends as if it had never been interrupted.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.errors import RemovedRun
from capd.lifecycle.inventory import look_at
from capd.store.disk.failpoints import NAMES
from capd.store.read.store import Store, open_store
from capd.store.verify.run import verify_run
from tests.kit.store.cli import Result, run_capd
from tests.kit.store.removing import age, files_below, small_run
from tests.kit.tiers import rows

WHOLE = ("trash.before_mark", "trash.after_mark", "trash.after_note", "trash.after_rename")
FREED = ("empty.after_mark", "empty.after_tree")
SERIES = (
    "remove.before_mark",
    "remove.after_mark",
    "remove.after_move",
    "remove.after_catalog",
    "remove.after_done",
)
BACK = ("restore.before_rename", "restore.after_rename")
KILLED = {"rm": WHOLE, "rm --no-trash": (*WHOLE, *FREED), "prune": WHOLE, "gc": FREED, "restore": BACK}
ROWS = [(command, name) for command, names in KILLED.items() for name in names]
FIRST = [("rm", "trash.after_mark"), ("prune", "trash.after_rename"), ("gc", "empty.after_mark")]


def test_every_failpoint_of_a_removal_is_reached_here() -> None:
    mine = {name for name in NAMES if name.partition(".")[0] in ("trash", "empty", "remove", "restore")}
    assert mine == {*WHOLE, *FREED, *SERIES, *BACK}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("original"), "old")


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Iterator[Path]:
    """A store with the runs `old` and `new`, and a file that is nobody's business."""
    place = tmp_path / "captures"
    place.mkdir()
    for name, days in (("old", 40), ("new", 1)):
        shutil.copytree(original, place / f"{name}.zarr")
        age(place / f"{name}.zarr", days)
    (place / "notes.txt").write_text("mine")
    kept = files_below(place / "new.zarr")
    yield place
    assert files_below(place / "new.zarr") == kept
    assert (place / "notes.txt").read_text() == "mine"


def command(words: str, root: Path, failpoint: str = "") -> Result:
    line: dict[str, tuple[str | Path, ...]] = {
        "rm": ("rm", root / "old.zarr", "--yes"),
        "rm --no-trash": ("rm", root / "old.zarr", "--yes", "--no-trash"),
        "prune": ("prune", root, "--keep-last", "1", "--yes"),
        "gc": ("gc", root, "--all", "--yes"),
        "restore": ("rm", root / "old.zarr", "--restore"),
    }
    return run_capd(*line[words], CAPD_FAILPOINTS=f"{failpoint}=kill" if failpoint else "")


def check_whole_or_removed(root: Path, content: dict[str, bytes]) -> bool:
    """What a reader sees of `old`: all of it, or that it was removed. Returns whether it is there."""
    try:
        store = Store(root / "old.zarr")
    except RemovedRun:
        return False
    assert [len(series) for series in store.series] == [3, 3]
    found = files_below(root / "old.zarr")
    assert {name: found.get(name) for name in content} == content
    return True


@pytest.mark.parametrize(("words", "failpoint"), rows(ROWS, FIRST))
def test_a_kill_loses_nothing_and_a_second_call_completes(
    words: str, failpoint: str, root: Path, original: Path
) -> None:
    content = files_below(original)
    if words in ("gc", "restore"):
        assert command("rm", root).code == 0
    killed = command(words, root, failpoint)
    assert killed.code == -signal.SIGKILL, killed.err
    check_whole_or_removed(root, content)

    again = command(words, root)
    if words == "restore":
        assert again.code == (0 if failpoint == "restore.before_rename" else 1), again.err
        assert check_whole_or_removed(root, content)
        assert verify_run(root / "old.zarr").damaged == []
        return
    # A run that the first call had removed already is told of, in one line.
    assert again.code == 0 or (words.startswith("rm") and "was removed on" in again.err), again.err
    assert not (root / "old.zarr").exists()
    assert not check_whole_or_removed(root, content)
    if words in ("rm", "prune"):
        [trashed] = root.glob(".capd/trash/*/old.zarr")
        found = files_below(trashed)
        assert {n: found[n] for n in content if n != "zarr.json"} == {
            n: content[n] for n in content if n != "zarr.json"
        }
        assert command("restore", root).code == 0
        assert check_whole_or_removed(root, content)
    else:
        assert command("gc", root).code == 0
        assert list(root.glob(".capd/trash/*")) == []


@pytest.mark.parametrize("failpoint", rows(SERIES, ["remove.after_move"]))
@pytest.mark.parametrize("then", ["again", "daemon"])
def test_a_kill_within_a_removal_of_series_is_completed(failpoint: str, then: str, root: Path) -> None:
    run = root / "old.zarr"
    gone, stays = (series.path for series in open_store(run).series)
    words = ("rm", run, "--series", gone, "--yes")
    killed = run_capd(*words, CAPD_FAILPOINTS=f"{failpoint}=kill")
    assert killed.code == -signal.SIGKILL, killed.err

    def seen() -> list[str]:
        store = open_store(run)
        for series in store.series:
            assert [series.numpy(n).tolist() for n in range(3)]
        return [series.path for series in store.series]

    expected = [gone, stays] if failpoint == "remove.before_mark" else [stays]
    assert seen() == expected
    if then == "daemon":
        # A writer that opens the run completes the removal, too.
        assert run_capd("verify", run, "--rebuild-catalog").code == 0
        assert seen() == expected
        assert (open_store(run).removed == []) == (failpoint == "remove.before_mark")
    else:
        again = run_capd(*words)
        assert again.code == (0 if failpoint == "remove.before_mark" else 5), again.err
        assert "was removed on" in run_capd("show", run, gone).err
        assert run_capd("rm", run, "--series", stays, "--yes").code == 0
        assert seen() == []
    assert verify_run(run).damaged == []
    assert verify_run(run).notes == []


def test_a_writer_that_comes_after_a_kill_begins_a_new_run(root: Path) -> None:
    """The half-removed run goes to the trash, and is not written."""
    assert command("rm", root, "trash.after_mark").code == -signal.SIGKILL
    assert look_at(root / "old.zarr").state == "removing"
    with pytest.raises(RemovedRun, match="was removed on"):
        open_store(root / "old.zarr")
    assert "was removed on" in run_capd("verify", root / "old.zarr").err
    checked = run_capd("verify", root)
    assert (checked.code, "left out" in checked.err, "new.zarr: sound" in checked.out) == (0, True, True)
    assert run_capd("gc", root, "--yes").code == 0
    assert not (root / "old.zarr").exists()
    small_run(root, "old")
    assert [len(series) for series in open_store(root / "old.zarr").series] == [3, 3]


def test_a_reader_from_before_is_told_of_the_removal_and_not_of_damage(root: Path) -> None:
    run = root / "old.zarr"
    store = open_store(run)
    first, second = store.series
    before = second.numpy(0)
    assert run_capd("rm", run, "--series", first.path, "--yes").code == 0
    with pytest.raises(RemovedRun, match=r"series .* was removed on"):
        first.numpy(0)
    assert (second.numpy(0) == before).all()
    assert command("rm", root).code == 0
    with pytest.raises(RemovedRun, match="was removed on"):
        second.numpy(0)
