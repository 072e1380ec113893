"""The last line of `capd run` can be pasted into a shell, wherever the captures are."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from capd.cli.jobs.next_line import note_next


@pytest.mark.parametrize("name", ["run.zarr", "a run.zarr", "it's $HOME.zarr"])
def test_paths_are_quoted_and_relative_where_that_is_shorter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, shown in ((tmp_path / "s" / name, f"s/{name}"), (Path("/") / name, f"/{name}")):
        note_next(path, ["job"])
        report, ls = capsys.readouterr().err.removeprefix("capd: next  ").split(" · ")
        assert shlex.split(report) == ["capd", "report", shown, "-o", "report.html"]
        assert shlex.split(ls) == ["capd", "ls", shown]


def test_without_captures_the_job_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    note_next(None, ["python", "-c", "a b"])

    assert capsys.readouterr().err == "capd: next  capd plan -- python -c 'a b' · capd doctor --quick\n"
    note_next(None, ["python"], has_daemon=False)
    assert capsys.readouterr().err == "capd: next  capd serve · capd doctor --quick\n"


def test_a_job_that_removed_its_directory_still_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    note_next(Path("/s/run.zarr"), ["job"])
    assert capsys.readouterr().err.endswith("capd ls /s/run.zarr\n")


def test_scalars_alone_have_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    note_next(Path("/run.zarr"), ["job"], has_tensors=False)

    assert capsys.readouterr().err == "capd: next  capd ls /run.zarr\n"
