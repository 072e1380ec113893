"""`capd top` on a real terminal, beside a real daemon and real ranks; and where there is no terminal."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.live.records import NewestRecords
from capd_client.protocol.counter_page import COUNTER_STEPS
from tests.kit import forking
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.live.tmux import Tmux
from tests.kit.store.cli import run_capd

TOP = (sys.executable, "-m", "capd", "top", "--interval", "0.5")
# Runs the command line where Textual cannot be imported.
WITHOUT_TEXTUAL = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "textual":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from capd.cli.app import main
main(sys.argv[1:])
"""


# An error inside capd, in the thread that samples or where the screen is drawn.
BROKEN = """
from capd.cli.app import main
import {module} as broken
def fail(*_):
    raise ZeroDivisionError("for the test")
broken.{name} = fail
main(["top"])
"""


# The terminal's signal is ignored, or Textual's timer does nothing, as on a busy machine now and then.
LOST = {
    "signal": """
import signal
real = signal.signal
signal.signal = lambda number, handler: real(number, signal.SIG_IGN if number == signal.SIGWINCH else handler)
""",
    "timer": """
from textual.app import App
real = App.set_timer
def set_timer(self, delay, callback=None, **more):
    lost = getattr(callback, "__name__", "") == "_check_resize"
    return real(self, delay, (lambda: None) if lost else callback, **more)
App.set_timer = set_timer
""",
}


class Job:
    """Ranks of one run, driven by the test."""

    def __init__(self, endpoint: Path, count: int) -> None:
        self.ranks = [Rank(endpoint, rank=number, run_id="exp7") for number in range(count)]
        self.connect()

    def connect(self) -> None:
        for rank in self.ranks:
            rank.connect()

    def step(self, number: int) -> None:
        """Commit a record of each rank in step `number`."""
        for rank in self.ranks:
            rank.put(number)
        for rank in self.ranks:
            rank.expect_acks(number)
            rank.memory[8 * COUNTER_STEPS : 8 * COUNTER_STEPS + 8] = struct.pack("Q", number + 1)
            rank.count(offered=number + 1)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def started(runtime_dir: Path, tmp_path: Path) -> Iterator[list[DaemonProcess]]:
    with daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock"))
        yield made


def endpoint(started: list[DaemonProcess]) -> dict[str, str]:
    return {"CAPD_ENDPOINT": f"unix:{started[0].path}"}


def fits(screen: str, columns: int) -> bool:
    return max(map(len, screen.splitlines())) <= columns


@pytest.mark.parametrize("columns", [40, 200])
def test_a_real_terminal_shows_64_ranks_and_takes_keys(
    started: list[DaemonProcess], runtime_dir: Path, columns: int
) -> None:
    job = Job(started[0].path, 64)
    job.step(0)
    with Tmux(runtime_dir, TOP, columns=columns, rows=40, **endpoint(started)) as terminal:
        screen = terminal.until(lambda shown: "ranks 64 live of 64" in shown, "the ranks")
        job.step(1)
        screen = terminal.until(
            lambda shown: "step 1" in shown and re.search(r"\n +0 +1 ", shown), "the next step"
        )
        assert fits(screen, columns)
        assert "rank▾" in screen
        assert ("main reason" in screen) == (columns == 200)
        terminal.until(lambda shown: "forward.x" in shown, "the records")
        terminal.type("s")
        terminal.until(lambda shown: "step▾" in shown, "the order")
        terminal.type("/", "6", "3", "Enter")
        terminal.until(lambda shown: "1 of 64 ranks" in shown, "the filter")
        terminal.type("Enter")
        terminal.until(lambda shown: "records/s" in shown, "the details")
        terminal.type("Escape")
        terminal.until(lambda shown: "1 of 64 ranks" in shown and "records/s" not in shown, "both lists")
        terminal.type("Escape", "d")
        terminal.until(lambda shown: "nothing was dropped" in shown, "the drops")
        terminal.resize(100, 20)
        terminal.until(
            lambda shown: "main reason" in shown and len(shown.splitlines()) == 20, "the other size"
        )
        assert terminal.in_alternate_screen
        terminal.type("q")
        assert terminal.until(lambda shown: "EXIT" in shown, "the end").split() == ["EXIT", "0"]
        assert not terminal.in_alternate_screen
    job.close()


@pytest.mark.parametrize("lost", LOST)
def test_a_new_size_is_found_with_the_next_sample_if_nothing_tells_it(
    started: list[DaemonProcess], runtime_dir: Path, lost: str
) -> None:
    code = f"{LOST[lost]}\nfrom capd.cli.app import main\nmain(['top', '--interval', '0.5'])"
    command = (sys.executable, "-c", code)
    with Tmux(runtime_dir, command, columns=40, rows=40, **endpoint(started)) as terminal:
        terminal.until(lambda shown: "no rank has connected" in shown, "the first sample")
        terminal.resize(100, 20)
        terminal.until(
            lambda shown: "main reason" in shown and len(shown.splitlines()) == 20, "the other size"
        )


def test_a_killed_daemon_leaves_its_last_values_and_comes_back(
    started: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    job = Job(started[0].path, 2)
    job.step(0)
    with Tmux(runtime_dir, TOP, columns=100, rows=30, **endpoint(started)) as terminal:
        terminal.until(lambda shown: "committed 2 " in shown, "the first step")
        started[0].stop(signal.SIGKILL)
        screen = terminal.until(lambda shown: "DAEMON GONE" in shown, "the banner")
        assert "committed 2 " in screen
        assert "ranks 2 live of 2" in screen
        terminal.type("t", "t", "s", "?")
        terminal.until(lambda shown: "move the cursor" in shown, "keys work meanwhile")
        terminal.type("Escape")
        started.append(DaemonProcess(tmp_path / "store", started[0].path))
        job.connect()
        job.step(1)
        screen = terminal.until(
            lambda shown: "DAEMON GONE" not in shown and "committed 4 " in shown, "the daemon again"
        )
        assert "was started again" in screen
        assert "Traceback" not in screen
        terminal.type("C-c")
        assert terminal.until(lambda shown: "EXIT" in shown, "the end").split() == ["EXIT", "0"]
    job.close()


def test_a_daemon_that_stands_still_stops_neither_the_screen_nor_its_end(
    started: list[DaemonProcess], runtime_dir: Path
) -> None:
    with Tmux(runtime_dir, TOP, columns=80, rows=24, **endpoint(started)) as terminal:
        terminal.until(lambda shown: "no rank has connected yet" in shown, "the first answer")
        started[0].process.send_signal(signal.SIGSTOP)
        terminal.until(lambda shown: "DAEMON GONE" in shown and "SIGSTOP" in shown, "the banner")
        terminal.type("?")
        terminal.until(lambda shown: "move the cursor" in shown, "the help")
        terminal.type("q")
        terminal.until(lambda shown: "EXIT 0" in shown, "the end")
        started[0].process.send_signal(signal.SIGCONT)


def test_it_waits_for_a_daemon_that_is_not_there_yet(runtime_dir: Path, tmp_path: Path) -> None:
    path = runtime_dir / "s.sock"
    with (
        Tmux(runtime_dir, TOP, columns=80, rows=24, CAPD_ENDPOINT=f"unix:{path}") as terminal,
        daemons() as made,
    ):
        terminal.until(lambda shown: "WAITING FOR THE DAEMON" in shown, "the banner")
        made.append(DaemonProcess(tmp_path / "store", path))
        terminal.until(lambda shown: "WAITING" not in shown and "run none yet" in shown, "the daemon")
        terminal.type("q")
        terminal.until(lambda shown: "EXIT 0" in shown, "the end")


def test_without_textual_one_line_says_what_to_install(runtime_dir: Path) -> None:
    command = (sys.executable, "-c", WITHOUT_TEXTUAL, "top")
    with Tmux(runtime_dir, command, columns=100, rows=10) as terminal:
        screen = terminal.until(lambda shown: "EXIT" in shown, "the end")

    lines = [line for line in screen.splitlines() if line]
    assert lines == [
        'capd: capd top needs textual: pip install "capd[tui]"; `capd stats --watch` needs nothing', "EXIT 1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [("capd.live.sampler", "Sampler.sample"), ("capd.top.app", "frame")],
    ids=["feed", "screen"],
)
def test_an_error_inside_capd_is_one_line_and_leaves_the_terminal_as_it_was(
    runtime_dir: Path, module: str, name: str
) -> None:
    command = (sys.executable, "-c", BROKEN.format(module=module, name=name))
    with Tmux(runtime_dir, command, columns=100, rows=20) as terminal:
        screen = terminal.until(lambda shown: "EXIT" in shown, "the end")
        assert not terminal.in_alternate_screen

    lines = [line for line in screen.splitlines() if line]
    assert lines == [
        "capd: internal error: ZeroDivisionError: for the test (see `capd --debug …`)", "EXIT 1",
    ]  # fmt: skip


def test_once_prints_one_frame(started: list[DaemonProcess]) -> None:
    job = Job(started[0].path, 3)
    job.step(0)
    job.ranks[1].count(offered=5, ring_full=4)
    # A record that comes after the first sample is in the frame, too.
    newest = NewestRecords(started[0].store / "exp7.zarr", "n")
    wait_for(lambda: len(newest.look()) == 3, "the records in the catalog")
    done = run_capd("top", "--once", COLUMNS="200", **endpoint(started))

    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    rows = {cells[0]: cells for line in done.out.splitlines() if (cells := line.split()) and "live" in cells}
    assert rows.keys() >= {"0", "1", "2"}
    # rank, step, rate, in flight, state, behind, arena and its unit, dropped, reason
    assert rows["1"][1:10] == ["0", "0", "0", "live", "-", "0", "%", "4", "ring_full"]
    assert "ranks 3 live of 3" in done.out
    assert "forward.x" in done.out
    other = run_capd("top", "--once", "--run", "exp8", **endpoint(started))
    assert (other.code, other.err) == (5, "capd: the daemon has no run exp8; its newest runs: exp7\n")
    job.close()


def test_alerts_of_a_real_rule_are_marked_and_counted(runtime_dir: Path, tmp_path: Path) -> None:
    config = runtime_dir / "capd.toml"
    config.write_text('[[trigger]]\nname = "any"\nmetric = "absmax"\nbelow = 1e30\nseverity = "critical"\n')
    with daemons() as made:
        made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock", "--config", str(config)))
        job = Job(made[0].path, 1)
        with Tmux(runtime_dir, TOP, columns=100, rows=40, **endpoint(made)) as terminal:
            terminal.until(
                lambda shown: "ranks 1 live of 1 " in shown and "alerts 0" in shown, "no alert yet"
            )
            job.step(0)
            screen = terminal.until(lambda shown: "alerts 1 (1 critical)" in shown, "the alert")
            assert len(re.findall(r"^\d\d:\d\d:\d\d exp7: critical alert, any: absmax = ", screen, re.M)) == 1
            # Red and bold.
            assert re.search(r"\x1b\[1m\x1b\[31m[^\x1b]* alert, any", terminal.coloured)
            made[0].stop(signal.SIGKILL)
            assert "alerts 1 (1 critical)" in terminal.until(
                lambda shown: "DAEMON GONE" in shown, "the banner"
            )
        made.append(DaemonProcess(tmp_path / "store", made[0].path, "--config", str(config)))
        job.connect()
        done = run_capd("top", "--once", COLUMNS="160", **endpoint(made))
        assert (done.code, done.err) == (0, "")
        assert "alerts 1 (1 critical)" in done.out
        assert done.out.count("exp7: critical alert, any: absmax = ") == 1
        job.close()


def test_once_needs_a_daemon_and_no_textual(runtime_dir: Path, started: list[DaemonProcess]) -> None:
    gone = run_capd("top", "--once", CAPD_ENDPOINT=f"unix:{runtime_dir / 'no.sock'}")
    assert gone.code == 3
    assert gone.err.startswith("capd: no daemon at ")
    command = [sys.executable, "-c", WITHOUT_TEXTUAL, "top", "--once"]
    environ = {**os.environ, **endpoint(started)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_terminal_it_is_a_watch_of_the_counters(
    started: list[DaemonProcess], tmp_path: Path
) -> None:
    job = Job(started[0].path, 1)
    job.step(0)
    out = tmp_path / "out"
    with (
        out.open("wb") as file,
        forking.popen(
            [*TOP],
            stdout=file,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **endpoint(started)},
        ) as watch,
    ):
        wait_for(lambda: len(out.read_text().splitlines()) >= 3, "three lines")
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == 130
    lines = out.read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d offered=1 committed=1 ", line) for line in lines)
    job.close()


def test_a_terminal_that_asks_too_often_is_refused() -> None:
    done = run_capd("top", "--once", "--interval", "0.1")
    assert done.code == 2
    assert "0.5" in done.err
