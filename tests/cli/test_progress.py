"""The progress bar: drawn on a terminal, nothing of it anywhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from capd.cli.progress import Progress


def test_the_bar_says_how_far_it_is_and_how_fast() -> None:
    progress = Progress(4, "files", drawn=False)
    for _ in range(3):
        progress.add(1 << 20)

    line = progress.line(progress.began + 2.0)

    assert line == f"[{'#' * 9}{'.' * 3}] 3 of 4 files, 3.0 MiB, 1.5 MiB/s, 0:01 left"


def test_the_time_left_is_said_after_the_first_seconds() -> None:
    progress = Progress(1000, "records", drawn=False)
    nothing = progress.line(progress.began + 5.0)
    progress.add(1 << 20)

    lines = [progress.line(progress.began + passed) for passed in (1.9, 2.0, 10.0)]

    assert [line.partition("/s, ")[2] for line in (nothing, *lines)] == ["", "", "33:18 left", "2:46:30 left"]


def test_a_long_line_fits_80_columns() -> None:
    progress = Progress(20_000, "records", drawn=False)
    for _ in range(10_000):
        progress.add(200 << 20)

    line = progress.line(progress.began + 7200.0)

    assert "10,000 of 20,000 records, 1.9 TiB" in line
    assert line.endswith("2:00:00 left")
    assert len(line) <= 80


def test_it_is_drawn_on_a_terminal_and_gone_at_the_end(second: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "capd", "export", str(second), "--out", str(tmp_path / "files")]
    with subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # the other end was closed
            pass
        finally:
            os.close(ours)

    assert process.returncode == 0
    assert b"of 6 records" in shown
    assert shown.endswith(b"\r\x1b[K")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["export", "import"])
def test_nothing_of_it_is_written_to_a_file(second: Path, tmp_path: Path, verb: str) -> None:
    files = tmp_path / "files"
    export = ["export", str(second), "--out", str(files)]
    commands = {
        "export": [export],
        "import": [export, ["import", str(files), "--store", str(tmp_path / "store")]],
    }

    for command in commands[verb]:
        done = subprocess.run(
            [sys.executable, "-m", "capd", *command], capture_output=True, text=True, timeout=60, check=True
        )

    assert done.stderr == ""
