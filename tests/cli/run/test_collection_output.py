"""What a collection run shows while a job runs, and of its log."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from capd.cli.run import collection_terminal as display_module
from capd.cli.run.collected_job import CollectedJob, last_lines
from capd.cli.run.collection_daemon import DaemonView
from capd.cli.run.collection_terminal import Display, progress_text
from capd.collect.request import CollectionRequest
from capd.collect.state import TypeState
from capd.metrics import DaemonStats, RunStats

CLEAR = b"\r\x1b[K"


class Terminal:
    """stderr, a terminal or not."""

    def __init__(self, tty: bool) -> None:
        self.buffer = io.BytesIO()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    def write(self, text: str) -> int:
        return self.buffer.write(text.encode())

    def flush(self) -> None:
        self.buffer.flush()


def shown(monkeypatch: pytest.MonkeyPatch, *, tty: bool) -> tuple[Display, io.BytesIO]:
    terminal = Terminal(tty)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    return Display(), terminal.buffer


def test_on_a_terminal_the_progress_stays_below_what_the_job_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    display, out = shown(monkeypatch, tty=True)

    display.progress("bf16 · 1 of 3")
    display.job_output(b"step 1\n")
    display.job_output(b"half")  # a line that is not over is not broken up
    display.progress("bf16 · 2 of 3")
    display.job_output(b" a line\n")
    display.progress("x" * 30)
    display.end()
    display.job_output(b"last\n")

    first, second = "bf16 · 1 of 3".encode(), "bf16 · 2 of 3".encode()
    assert out.getvalue() == (
        first + CLEAR + b"step 1\n" + first + CLEAR + b"half" + b" a line\n" + second + CLEAR + b"x" * 19 + CLEAR
        + b"last\n"
    )  # fmt: skip


def test_elsewhere_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    display, out = shown(monkeypatch, tty=False)

    for now[0] in (110.0, 131.0, 140.0, 162.0):
        display.progress(f"at {now[0]:g}")
    display.job_output(b"no end of line")
    display.end()

    assert out.getvalue() == b"capd: at 131\ncapd: at 162\nno end of line\n"


def test_all_that_a_job_prints_is_shown_and_logged_whatever_the_log_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    display, out = shown(monkeypatch, tty=False)
    code = "import os; os.write(1, b'out' * 50000); os.write(2, b'err\\n')"

    def run(log: Path) -> bytes:
        before = len(out.getvalue())
        job = CollectedJob(
            [sys.executable, "-c", code], dict(os.environ), mark="A=1", log=log, display=display
        )
        with job:
            job.start()
            assert job.process.wait(30) == 0
        return out.getvalue()[before:]

    printed = b"out" * 50000 + b"err\n"
    assert run(tmp_path / "log") == printed
    assert (tmp_path / "log").read_bytes() == printed
    assert (
        run(Path("/dev/full")).replace(b"capd: the job's log ends here: No space left on device\n", b"")
        == printed
    )
    missing = CollectedJob(["no-such-command"], {}, mark="A=1", log=tmp_path / "other", display=display)
    with missing, pytest.raises(FileNotFoundError):
        missing.start()


def test_the_last_lines_of_a_log_are_harmless_and_few(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(
        b"".join(b"line %d\n" % n for n in range(100_000)) + b"\x1b[31mred\xff\tend\nlong" + b"x" * 9999
    )

    found = last_lines(log)

    assert found[:18] == [f"line {n}" for n in range(99_982, 100_000)]
    assert found[18] == "[31mred\ufffd\tend"
    assert (len(found), len(found[19])) == (20, 400)
    assert last_lines(tmp_path / "none") == []


def test_the_line_of_progress_says_what_is_kept_of_what_is_expected() -> None:
    def text(name: str, expected: int | None, view: DaemonView | None, **asked: Any) -> str:
        more = {"micro_batches": 3, "timeout_s": 900.0, **asked}
        request = CollectionRequest("batch", ("bf16",), **more, **REST)
        one = TypeState(quant_type=name, micro_batches=1, records=1062)
        return progress_text(one, request, view, expected, 12.3)

    assert text("bf16", None, seen(None)) == (
        "bf16 · 1 of 3 micro-batches · 1,062 records · 0.0 MiB/s · disk left 3.0 GiB · 0 dropped · 12 s of 900 s"
    )
    assert text("mxfp8", 3186, seen({"disk_full": 2, "sampled": 9}), timeout_s=0.0) == (
        "mxfp8 · 1 of 3 micro-batches · 1,062 of 3,186 records · 1.5 MiB/s · disk left 3.0 GiB · 2 dropped · 12 s"
    )
    assert text("mxfp8", 3186, None, micro_batches=0) == (
        "mxfp8 · 1 micro-batches · 1,062 of 3,186 records · the daemon does not answer · 12 s of 900 s"
    )


REST: dict[str, Any] = {"per_iteration": 1, "until": "complete", "stable_for_s": 60.0}


def seen(dropped: dict[str, int] | None) -> DaemonView:
    """What a daemon says, of a run with these drops, None for no run yet."""
    daemon = DaemonStats.model_construct(disk_free=4 << 30, keep_free=1 << 30)
    return DaemonView(
        daemon, None if dropped is None else RunStats.model_construct(rate_mib_s=1.5, dropped=dropped)
    )
