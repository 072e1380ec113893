"""The metrics file is replaced as a whole, is capd's own, and leaves with its daemon."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from capd.errors import ConfigError, EndpointError, StoreBusy
from capd.server.metrics import textfile
from capd.server.metrics.textfile import TextFile
from tests.kit.daemon import PATIENCE_S, wait_for

PAGE = b"# HELP capd_x A page\ncapd_x 1\n"


def test_the_file_is_written_again_and_again_and_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(textfile, "INTERVAL_S", 0.01)
    path, pages = tmp_path / "capd.prom", iter(range(10**9))
    seen: set[bytes] = set()
    file = TextFile(path)
    file.start(lambda: PAGE + b"# %d\n" % next(pages))
    wait_for(path.exists, "the first page")
    wait_for(lambda: seen.add(path.read_bytes()) or len(seen) > 3, "further pages")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert all(page.startswith(PAGE) and page.endswith(b"\n") for page in seen)
    assert {one.suffix for one in tmp_path.iterdir() if one != path} <= {".lock", ".new"}
    file.close()

    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_killed_daemon_is_replaced_and_a_foreign_one_never(tmp_path: Path) -> None:
    (tmp_path / "left.prom").write_bytes(PAGE)
    (tmp_path / "other.prom").write_text("# HELP other A page\n")
    (tmp_path / "link.prom").symlink_to(tmp_path / "left.prom")
    TextFile(tmp_path / "left.prom").close()

    for name in ("other.prom", "link.prom"):
        with pytest.raises(ConfigError, match=r"is not replaced: .* choose another --metrics-file"):
            TextFile(tmp_path / name)
    assert (tmp_path / "other.prom").read_text() == "# HELP other A page\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["left.prom", "link.prom", "other.prom"]


def test_a_name_that_node_exporter_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.prom"):
        TextFile(tmp_path / "capd.txt")


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        EndpointError, match="absent: no such file or directory; choose another --metrics-file"
    ):
        TextFile(tmp_path / "absent" / "capd.prom")


def test_two_daemons_do_not_share_a_file(tmp_path: Path) -> None:
    first = TextFile(tmp_path / "capd.prom")
    with pytest.raises(StoreBusy, match="another daemon writes"):
        TextFile(tmp_path / "capd.prom")
    first.close()

    TextFile(tmp_path / "capd.prom").close()


def test_a_failed_write_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(textfile, "INTERVAL_S", 0.01)
    attempts = 0

    def page() -> bytes:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise OSError("no space")
        return PAGE

    file = TextFile(tmp_path / "capd.prom")
    file.start(page)
    wait_for((tmp_path / "capd.prom").exists, "the first page")
    file.close()

    assert len([record for record in caplog.records if "cannot write" in record.message]) == 1


def test_a_pipe_or_a_link_in_place_of_the_new_file_holds_nothing_up_and_changes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(textfile, "INTERVAL_S", 0.01)
    path, new, other = tmp_path / "capd.prom", tmp_path / ".capd.prom.new", tmp_path / "other"
    other.write_text("kept")
    file = TextFile(path)
    os.mkfifo(new)
    file.start(lambda: PAGE)
    wait_for(path.exists, "a page in spite of the pipe")
    file.close()
    file = TextFile(path)
    os.link(other, new)
    file.start(lambda: PAGE)
    wait_for(path.exists, "a page in spite of the link")
    file.close()

    assert other.read_text() == "kept"


def test_the_end_does_not_wait_for_a_page_that_never_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(textfile, "_STOP_S", 0.01)
    asked, answered = threading.Event(), threading.Event()

    def page() -> bytes:
        asked.set()
        assert answered.wait(PATIENCE_S)
        return PAGE

    file = TextFile(tmp_path / "capd.prom")
    file.start(page)
    assert asked.wait(PATIENCE_S)
    file.close()
    answered.set()
    thread = file._thread
    assert thread is not None
    thread.join(PATIENCE_S)

    # What comes after all is not written.
    assert list(tmp_path.iterdir()) == []
