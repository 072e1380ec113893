"""How far a collection run is, kept beside the run: what a second start goes on from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from capd.collect.request import CollectionRequest
from capd.collect.state import CollectionState, directory_of, load, locked, paths_of_try, save, unfinished
from capd.errors import ConfigError, StoreBusy, StoreError

ASKED = CollectionRequest("batch", ("bf16", "Mx/8"), 3, 2, "complete", 60.0, 900.0)
COMMAND = ["train.sh"]


def begun(
    store: Path, run_id: str, *outcomes: str | None, asked: CollectionRequest = ASKED
) -> CollectionState:
    """A collection on the disk, its types with these outcomes."""
    directory = directory_of(store, run_id)
    directory.mkdir(parents=True, exist_ok=True)
    state = load(directory, run_id, asked, COMMAND)
    for one, outcome in zip(state.types, outcomes, strict=True):
        one.outcome, one.tries = outcome, 1  # type: ignore[assignment]
    save(directory, state)
    return state


def test_what_was_saved_is_loaded_with_types_that_are_new_behind_it(tmp_path: Path) -> None:
    begun(tmp_path, "r", "complete", "failed")
    directory = directory_of(tmp_path, "r")
    more = load(directory, "r", replace(ASKED, types=("bf16", "hifp8")), ["other.sh"])

    assert [(one.quant_type, one.collected, one.tries) for one in more.types] == [
        ("bf16", True, 1), ("Mx/8", False, 1), ("hifp8", False, 0)
    ]  # fmt: skip
    assert more.command == ["other.sh"]
    assert not more.finished
    assert [path.name for path in directory.iterdir()] == ["state.json"]
    assert (directory / "state.json").stat().st_mode & 0o777 == 0o600


def test_other_numbers_under_the_same_name_are_refused(tmp_path: Path) -> None:
    begun(tmp_path, "r", "complete", "failed")
    with pytest.raises(ConfigError, match="--control-iter 3 --collect-micro-batches 2"):
        load(directory_of(tmp_path, "r"), "r", replace(ASKED, micro_batches=4), COMMAND)


def test_the_newest_unfinished_collection_of_the_same_command_is_found(tmp_path: Path) -> None:
    for age, (run_id, *outcomes) in enumerate(
        [("old", "complete", None), ("newer", "complete", None), ("done", "complete", "stable")]
    ):
        begun(tmp_path, run_id, *outcomes)
        os.utime(directory_of(tmp_path, run_id) / "state.json", (1000 + age, 1000 + age))
    broken = directory_of(tmp_path, "broken")
    broken.mkdir()
    (broken / "state.json").write_text('{"version": 9}')

    assert unfinished(tmp_path, ASKED, COMMAND) == "newer"
    assert unfinished(tmp_path, ASKED, ["other.sh"]) is None
    assert unfinished(tmp_path, replace(ASKED, micro_batches=4), COMMAND) is None
    assert unfinished(tmp_path, replace(ASKED, types=("bf16",)), COMMAND) is None
    assert unfinished(tmp_path / "none", ASKED, COMMAND) is None
    with pytest.raises(StoreError, match="move it away"):
        load(broken, "broken", ASKED, COMMAND)


def test_each_try_has_a_directory_of_its_own_whatever_the_type_is_called(tmp_path: Path) -> None:
    state = begun(tmp_path, "r", None, None)
    places = []
    for one in state.types:
        for one.tries in (1, 2):
            places += paths_of_try(tmp_path, one)

    assert len(set(places)) == 8
    assert places[:4] == [
        tmp_path / name for name in ("runs/bf16", "logs/bf16.log", "runs/bf16~2", "logs/bf16~2.log")
    ]
    assert all(path.parent in (tmp_path / "runs", tmp_path / "logs") for path in places)


def test_two_commands_do_not_collect_into_one_run_at_once(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, "r")
    directory.mkdir()

    with (
        locked(directory),
        pytest.raises(StoreBusy, match="r is being collected by another"),
        locked(directory),
    ):
        pass
    with locked(directory):
        pass
