"""A run whose daemons differ: one with a recorder is killed, one without goes on, and one with comes again."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.integration.recorder.test_holding import K, SteppingRank, kept_iterations, ledger, serve
from tests.kit.daemon import DaemonProcess, daemons, wait_for


def test_what_is_held_over_a_daemon_without_a_recorder_counts_once(tmp_path: Path) -> None:
    with daemons() as made:
        made.append(daemon := serve(tmp_path, memory="0"))
        rank = SteppingRank(daemon.path)
        rank.connect()
        for iteration in range(6):
            rank.step(iteration)
        wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")
        daemon.stop(signal.SIGKILL)
        rank.disconnect()

        made.append(plain := DaemonProcess(tmp_path / "store", tmp_path / "sock-plain"))
        rank.path = plain.path
        rank.connect()
        rank.acked.clear()
        rank.step(6)
        rank.bye()
        wait_for(lambda: plain.run_stats("run")["committed"] >= 3, "it is stored")
        print(plain.run_stats("run"))
        rank.close()
        print(plain.stop())

        made.append(daemon := serve(tmp_path, 2, memory="0"))
        wait_for(lambda: daemon.run_stats("run") and not daemon.run_stats("run")["in_flight"], "all is settled")
        stats = daemon.run_stats("run")
        print(stats)
        assert ledger(stats) == (21, 3, 0, {"expired": 18})
        assert daemon.stop() == 0
    assert kept_iterations(tmp_path / "store" / "run.zarr") == [6]
    assert not list(tmp_path.rglob("*.held"))
