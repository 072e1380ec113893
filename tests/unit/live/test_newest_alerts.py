"""The newest alerts of a run whose files grow."""

from __future__ import annotations

from pathlib import Path

from capd.live.alerts import MAX_NEWEST_ALERTS, NewestAlerts
from capd.store.alerts.file import alerts_path
from capd.store.disk.layout import node_directory
from tests.kit.store.alerting import alert, give_alerts


def made(run: Path, *nodes: str) -> Path:
    for node in nodes:
        node_directory(run, node).mkdir(parents=True)
    return run


def test_alerts_are_kept_as_they_come_and_all_are_counted(tmp_path: Path) -> None:
    run = made(tmp_path / "run.zarr", "a", "b")
    of_node, of_all = NewestAlerts(run, "a"), NewestAlerts(run)
    assert not of_node.look()
    give_alerts(run, "a", alert(1), alert(3, severity="critical"))
    give_alerts(run, "b", alert(2, severity="info"))
    assert of_node.look()
    assert of_all.look()
    assert not of_node.look()
    give_alerts(run, "a", *(alert(number) for number in range(4, 4 + MAX_NEWEST_ALERTS)))
    of_node.look()

    assert [one.iteration for one in of_all.newest] == [1, 2, 3]
    assert dict(of_all.counts) == {"warning": 1, "critical": 1, "info": 1}
    assert [one.iteration for one in of_node.newest] == list(range(4, 4 + MAX_NEWEST_ALERTS))
    assert dict(of_node.counts) == {"warning": 1 + MAX_NEWEST_ALERTS, "critical": 1}


def test_a_run_that_is_begun_again_begins_without_alerts(tmp_path: Path) -> None:
    run = made(tmp_path / "run.zarr", "a")
    give_alerts(run, "a", alert(1), alert(2))
    newest = NewestAlerts(run, "a")
    newest.look()
    # The old directory stays, so that the new one has another inode.
    run.rename(tmp_path / "old")
    newest.look()
    assert "No such file" in newest.problem
    made(run, "a")
    give_alerts(run, "a", alert(9, severity="critical"))

    assert newest.look()
    assert [one.iteration for one in newest.newest] == [9]
    assert (dict(newest.counts), newest.problem) == ({"critical": 1}, "")


def test_a_file_that_cannot_be_read_is_a_problem_and_no_error(tmp_path: Path) -> None:
    run = made(tmp_path / "run.zarr", "a")
    alerts_path(run, "a").mkdir()
    newest = NewestAlerts(run, "a")

    assert not newest.look()
    assert "is not a regular file" in newest.problem
    alerts_path(run, "a").rmdir()
    give_alerts(run, "a", alert(1))
    assert newest.look()
    assert newest.problem == ""
