"""The reports of the page: bounded in number and bytes, private, made again after a change, and ended with the page."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.errors import ConfigError, NotAStore, StoreBusy
from capd.web.reading.catalogs import Runs
from capd.web.reports.process import ReportProcess
from capd.web.reports.shelf import ReportShelf
from capd_client.protocol.key import Moment
from tests.kit.daemon import wait_for
from tests.kit.store.cli import StoreWriter, bf16_bits, linear_key

ODD = "-o 'x' \u202e <b>\n$(echo) 🎉"
LIMIT_S = 120.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    writer = StoreWriter(tmp_path / "runs")
    for run in ("one", "two"):
        for iteration in range(2):
            bits = bf16_bits(np.random.default_rng(iteration).normal(size=(32, 64)))
            writer.put(run, linear_key(), bits, "bfloat16", Moment(iteration=iteration))
    return writer.close()


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files; nothing of a page is left in it."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []


def made(shelf: ReportShelf, run: str, kind: str = "quick") -> dict[str, Any]:
    shelf.make(run, kind)
    return waited(shelf, run, kind)


def waited(shelf: ReportShelf, run: str, kind: str = "quick") -> dict[str, Any]:
    def state() -> dict[str, Any]:
        return dict(shelf.look(run)["kinds"][kind])

    wait_for(lambda: state()["state"] != "making", "a report", LIMIT_S)
    return state()


def text_of(shelf: ReportShelf, run: str, kind: str = "quick") -> bytes:
    file, nbytes = shelf.opened(run, kind)
    with file:
        text = file.read()
    assert len(text) == nbytes
    return text


@pytest.mark.parametrize("bounds", [{"most_kept": 1}, {"most_nbytes": 350_000}], ids=["number", "bytes"])
def test_only_the_newest_reports_are_kept(root: Path, temporary: Path, bounds: dict[str, int]) -> None:
    shelf = ReportShelf(Runs(root), **bounds)
    try:
        for run in ("one", "two"):
            assert made(shelf, run)["state"] == "ready"
            assert text_of(shelf, run).startswith(b"<!doctype html>")
        assert shelf.look("one")["kinds"]["quick"] == {"state": "none"}
        with pytest.raises(NotAStore, match=r"no quick report of one\.zarr as it is now"):
            shelf.opened("one", "quick")
        [directory] = temporary.iterdir()
        [page] = directory.glob("*/*")
        assert [stat.S_IMODE(os.stat(one).st_mode) for one in (directory, page.parent, page)] == [
            0o700, 0o700, 0o600,
        ]  # fmt: skip
    finally:
        shelf.close()


def test_a_report_is_made_again_when_its_run_has_changed(root: Path, temporary: Path) -> None:
    shelf = ReportShelf(Runs(root))
    try:
        assert made(shelf, "one")["state"] == "ready"
        # Another one is not begun as long as this one is right.
        shelf.make("one", "quick")
        assert shelf.look("one")["kinds"]["quick"]["state"] == "ready"
        reading, _ = shelf.opened("one", "quick")
        writer = StoreWriter(root)
        writer.put("one", linear_key(), bf16_bits(np.ones((32, 64))), "bfloat16", Moment(iteration=9))
        writer.close()
        found = shelf.look("one")["kinds"]["quick"]
        assert found["state"] == "failed"
        assert "has changed" in found["problem"]
        with pytest.raises(NotAStore):
            shelf.opened("one", "quick")
        assert not list(temporary.glob("*/*/*"))
        # Whoever reads the report meanwhile gets the whole.
        with reading:
            assert reading.read().endswith(b"</html>\n")
        assert made(shelf, "one")["state"] == "ready"
        shutil.rmtree(root / "one.zarr")
        for asked in (
            shelf.look,
            lambda run: shelf.opened(run, "quick"),
            lambda run: shelf.make(run, "quick"),
        ):
            with pytest.raises(NotAStore, match=r"one\.zarr"):
                asked("one")
    finally:
        shelf.close()


@pytest.mark.parametrize(("changes", "state"), [(1, "ready"), (2, "failed")])
def test_a_report_whose_run_changes_meanwhile_is_made_once_more(
    root: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, changes: int, state: str
) -> None:
    waited = ReportProcess.wait
    made_of: list[int] = []

    def wait(process: ReportProcess, limit_s: float) -> tuple[int | None, str]:
        found = waited(process, limit_s)
        if len(made_of) < changes:
            os.utime(root / "one.zarr" / "zarr.json", (1, len(made_of)))
        made_of.append(process.pid)
        return found

    monkeypatch.setattr(ReportProcess, "wait", wait)
    shelf = ReportShelf(Runs(root))
    try:
        assert made(shelf, "one")["state"] == state
        assert len(made_of) == 2
        assert len(list(temporary.glob("*/*/report.html"))) == (state == "ready")
    finally:
        shelf.close()


def test_one_report_is_made_at_a_time_and_may_be_stopped(root: Path) -> None:
    shelf = ReportShelf(Runs(root))
    try:
        with pytest.raises(ConfigError, match="none of quick, full"):
            shelf.make("one", "other")
        shelf.make("one", "full")
        shelf.make("one", "full")
        assert shelf.look("one")["kinds"]["full"]["state"] == "making"
        with pytest.raises(StoreBusy, match=r"the full report of one\.zarr is being made"):
            shelf.make("two", "quick")
        shelf.stop("two")
        assert shelf.look("one")["kinds"]["full"]["state"] == "making"
        shelf.stop("one")
        assert waited(shelf, "one", "full") == {"state": "none"}
    finally:
        shelf.close()


@pytest.mark.parametrize(
    ("bounds", "words"),
    [({"most_nbytes": 1000}, "larger than 0 mib"), ({"limit_s": 0.01}, "took longer than")],
    ids=["too large", "too long"],
)
def test_a_report_that_fails_says_why_in_one_line(
    root: Path, temporary: Path, bounds: dict[str, Any], words: str
) -> None:
    shelf = ReportShelf(Runs(root), **bounds)
    try:
        found = made(shelf, "one")
        assert found["state"] == "failed"
        assert words in found["problem"].lower()
        assert "\n" not in found["problem"]
        assert not list(temporary.glob("*/*"))
    finally:
        shelf.close()


def test_a_run_that_is_removed_meanwhile_ends_its_report(root: Path, temporary: Path) -> None:
    shelf = ReportShelf(Runs(root))
    try:
        shelf.make("one", "quick")
        shutil.rmtree(root / "one.zarr")
        with pytest.raises(NotAStore, match=r"one\.zarr"):
            shelf.look("one")
        # The next one may begin, and nothing of the first is left.
        wait_for(lambda: begun(shelf, "two"), "the end of the first", LIMIT_S)
        assert waited(shelf, "two")["state"] == "ready"
        assert len(list(temporary.glob("*/*"))) == 1
    finally:
        shelf.close()


def begun(shelf: ReportShelf, run: str) -> bool:
    try:
        shelf.make(run, "quick")
    except StoreBusy:
        return False
    return True


def test_odd_names_are_names(root: Path) -> None:
    shutil.move(root / "one.zarr", root / f"{ODD}.zarr")
    shelf = ReportShelf(Runs(root))
    try:
        found = made(shelf, ODD)
        assert found["state"] == "ready", found
        assert b"<b>" not in text_of(shelf, ODD)
    finally:
        shelf.close()


def test_the_end_of_the_page_ends_the_process(root: Path) -> None:
    shelf = ReportShelf(Runs(root))
    shelf.make("one", "full")
    wait_for(lambda: shelf._making is None or shelf._making.process is not None, "the process")
    assert shelf._making is not None
    assert shelf._making.process is not None
    pid = shelf._making.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0)
    shelf.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(Exception, match="the page ends"):
        shelf.make("two", "quick")
