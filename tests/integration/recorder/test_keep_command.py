"""`capd ctl keep` against real daemons: what it says in one line, and its exit code, when nothing can be kept."""

from __future__ import annotations

from pathlib import Path

from tests.integration.recorder.test_holding import K, SteppingRank, serve
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.store.cli import Result, run_capd


def keep(endpoint: Path, *words: str) -> Result:
    done = run_capd("ctl", "keep", "--endpoint", f"unix:{endpoint}", *words)
    assert (done.out + done.err).count("\n") == 1, (done.out, done.err)
    return done


def test_a_keep_that_cannot_be_says_why_in_one_line(tmp_path: Path) -> None:
    nobody = keep(tmp_path / "none.sock")
    assert nobody.code == 3
    with daemons() as made:
        made.append(daemon := serve(tmp_path))
        alone = keep(daemon.path)
        assert (alone.code, "no rank is connected" in alone.err) == (5, True)
        rank = SteppingRank(daemon.path)
        rank.connect()
        for iteration in range(10):
            rank.step(iteration)
        wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")

        other = keep(daemon.path, "--run-id", "other")
        assert (other.code, "run 'other' has no live rank" in other.err) == (5, True)
        gone = keep(daemon.path, "--iteration", "0")
        assert gone.code == 1
        assert "run run: nothing is kept: iterations 0 to 4 are gone; held are 6 to 9" in gone.err
        wrong = keep(daemon.path, "--reason", "x" * 201)
        assert wrong.code == 2
        assert daemon.run_stats("run")["window"]["keeps"] == []

        done = keep(daemon.path, "--iteration", "8", "--reason", "loss spike")
        assert (done.code, done.out) == (
            0, "run run: keeps the iterations around iteration 8; `capd stats` lists them\n",
        )  # fmt: skip
        wait_for(lambda: daemon.run_stats("run")["window"]["keeps"], "it is kept")
        shown = run_capd("stats", CAPD_ENDPOINT=f"unix:{daemon.path}").out
        assert "loss spike at iteration 8 (node n)" in shown
        rank.bye()
        rank.close()


def test_a_daemon_without_a_recorder_says_what_to_write(tmp_path: Path) -> None:
    with daemons() as made:
        made.append(daemon := DaemonProcess(tmp_path / "store", tmp_path / "sock"))
        rank = Rank(daemon.path)
        rank.connect()
        refused = keep(daemon.path)
        assert refused.code == 1
        assert "has no flight recorder" in refused.err
        assert "put iterations = 8 into [window] of capd.toml, and restart the daemon" in refused.err
        rank.close()
