"""Names of runs: hostile ones are refused, and ranks without one share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.errors import ConfigError
from capd.server.daemon import node_name
from capd.server.runs.names import RunNames, check_run_id, new_run_id
from capd.server.runs.root_lock import OwnerNote


@pytest.mark.parametrize("good", ["run", "2026-11-21_a.b+c", "实验 7", "x" * 128, "a:b", "slurm-12.0"])
def test_usual_names_pass(good: str) -> None:
    assert check_run_id(good) == good


@pytest.mark.parametrize(
    "bad",
    [
        "", " ", "..", ".hidden", "../up", "a/b", "a\\b", "a\nb", "a\0b", "a\x7f", "a\u202eb", "a\u2028b", "-rf",
        "~root", "x" * 129, "语" * 100, " a", "a ",
    ],
)  # fmt: skip
def test_hostile_names_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="run id"):
        check_run_id(bad)


def test_a_new_name_is_one_that_no_run_has(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        name = new_run_id(tmp_path)
        (tmp_path / f"{name}.zarr").mkdir()
        seen.add(name)
    assert len(seen) == 3


def test_the_rank_decides_then_the_daemon_then_a_shared_name(tmp_path: Path) -> None:
    def active(_: str) -> bool:
        return True

    assert RunNames(tmp_path, "mine", OwnerNote()).resolve("theirs", active) == "theirs"
    assert RunNames(tmp_path, "mine", OwnerNote()).resolve(None, active) == "mine"
    names = RunNames(tmp_path, None, OwnerNote())
    assert names.resolve(None, active) == names.resolve(None, active)
    with pytest.raises(ConfigError):
        names.resolve("../up", active)


def test_ranks_that_do_not_overlap_get_different_runs(tmp_path: Path) -> None:
    names = RunNames(tmp_path, None, OwnerNote())
    first = names.resolve(None, lambda _: False)
    (tmp_path / f"{first}.zarr").mkdir()

    assert names.resolve(None, lambda _: False) != first


def test_after_a_crash_new_ranks_join_the_run_that_goes_on(tmp_path: Path) -> None:
    left = OwnerNote(assigned_run="before")

    assert RunNames(tmp_path, None, left).resolve(None, lambda run: run == "before") == "before"
    assert RunNames(tmp_path, None, left).resolve(None, lambda _: False) != "before"


def test_node_names_are_safe_in_paths() -> None:
    assert node_name("gpu-07.cluster") == "gpu-07.cluster"
    assert node_name("../evil/host") == "evil-host"
    assert node_name("...") == "node"
    assert node_name(None)
