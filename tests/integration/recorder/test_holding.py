"""The flight recorder of a real daemon: what it holds, lets go and keeps, over kills of the daemon and of ranks."""

from __future__ import annotations

import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from capd.store.read.store import Store
from capd_client.protocol.counter_page import COUNTER_STEPS, PAGE_NBYTES
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor, Put
from tests.kit.daemon import DaemonProcess, Rank, daemons, payload, wait_for

PER_STEP = 3
K = 4


class SteppingRank(Rank):
    """A rank that captures PER_STEP records in each iteration, and waits until they are acknowledged."""

    def step(self, iteration: int, nbytes: int = 8) -> None:
        self.memory[8 * COUNTER_STEPS : 8 * COUNTER_STEPS + 8] = struct.pack("Q", iteration + 1)
        items = []
        for number in range(PER_STEP):
            sequence = iteration * PER_STEP + number + 1
            offset = PAGE_NBYTES + nbytes * number
            self.memory[offset : offset + nbytes] = (payload(sequence) * (nbytes // 8))[:nbytes]
            moment = Moment(iteration=iteration, call=number)
            items.append(Descriptor(sequence, offset, nbytes, 0, (nbytes // 2,), moment))
        self.send(Put(items))
        self.expect_acks(*(item.sequence for item in items))
        self.count(offered=(iteration + 1) * PER_STEP)


def serve(tmp_path: Path, number: int = 0, **settings: str) -> DaemonProcess:
    # The default of bytes needs more room than a machine for tests may have.
    rows = {"iterations": str(K), "bytes": '"64MiB"', **settings}
    place = tmp_path / f"capd-{number}.toml"
    place.write_text(
        "[daemon]\nidle_seal_s = 1\n[window]\n"
        + "".join(f"{name} = {value}\n" for name, value in rows.items())
    )
    return DaemonProcess(tmp_path / "store", tmp_path / f"sock-{number}", "--config", str(place))


def kept_iterations(run: Path) -> list[int]:
    found = []
    for series in Store(run).series:
        for number, moment in enumerate(series.moments):
            sequence = moment.iteration * PER_STEP + moment.call + 1
            assert series[number].numpy().tobytes() == payload(sequence)
            found.append(moment.iteration)
    return sorted(set(found))


def ledger(stats: dict[str, Any]) -> tuple[int, int, int, dict[str, int]]:
    assert stats["offered"] == stats["committed"] + stats["in_flight"] + sum(stats["dropped"].values())
    return stats["offered"], stats["committed"], stats["in_flight"], stats["dropped"]


def test_a_clean_run_keeps_nothing_and_counts_all_of_it(tmp_path: Path) -> None:
    with daemons() as made:
        made.append(daemon := serve(tmp_path))
        rank = SteppingRank(daemon.path)
        rank.connect()
        for iteration in range(10):
            rank.step(iteration)
        wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")
        stats = daemon.run_stats("run")
        assert ledger(stats) == (30, 0, 12, {"expired": 18})
        assert (stats["window"]["first"], stats["window"]["last"]) == (6, 9)
        rank.bye()
        wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
        assert ledger(daemon.run_stats("run")) == (30, 0, 0, {"expired": 30})
        rank.close()
        assert daemon.stop() == 0
    assert kept_iterations(tmp_path / "store" / "run.zarr") == []
    assert not list(tmp_path.rglob("*.held"))


@pytest.mark.parametrize("memory", ["0", '"1MiB"'])
def test_held_records_outlive_the_daemon_and_its_stop_keeps_them(tmp_path: Path, memory: str) -> None:
    with daemons() as made:
        made.append(daemon := serve(tmp_path, memory=memory))
        rank = SteppingRank(daemon.path)
        rank.connect()
        for iteration in range(6):
            rank.step(iteration)
        wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")
        daemon.stop(signal.SIGKILL)
        rank.disconnect()
        made.append(daemon := serve(tmp_path, 1, memory=memory))
        rank.path = daemon.path
        rank.connect()
        assert ledger(daemon.run_stats("run")) == (18, 0, 12, {"expired": 6})
        rank.acked.clear()
        rank.step(5)
        rank.step(6)
        rank.disconnect()
        rank.close()
        daemon.stop()
    assert kept_iterations(tmp_path / "store" / "run.zarr") == [3, 4, 5, 6]


def test_a_keep_commits_the_iterations_around_it_and_the_account_stays_exact(tmp_path: Path) -> None:
    with daemons() as made:
        made.append(daemon := serve(tmp_path, post="2"))
        rank = SteppingRank(daemon.path)
        rank.connect()
        for iteration in range(10):
            rank.step(iteration)
        wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")
        assert daemon.control("keep", "run").code == "ok"
        wait_for(lambda: daemon.run_stats("run")["committed"] == K * PER_STEP, "the window is committed")
        for iteration in range(10, 16):
            rank.step(iteration)
        rank.bye()
        wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the rest leaves")
        stats = daemon.run_stats("run")
        assert ledger(stats) == (48, 18, 0, {"expired": 30})
        [keep] = stats["window"]["keeps"]
        assert (keep["first"], keep["iteration"], keep["last"]) == (6, 9, 11)
        rank.close()
        assert daemon.stop() == 0
    assert kept_iterations(tmp_path / "store" / "run.zarr") == [6, 7, 8, 9, 10, 11]
    assert not list(tmp_path.rglob("*.held"))


def test_what_is_kept_is_committed_once_if_the_daemon_is_killed_at_the_keep(tmp_path: Path) -> None:
    with daemons() as made:
        made.append(daemon := serve(tmp_path))
        rank = SteppingRank(daemon.path)
        rank.connect()
        for iteration in range(6):
            rank.step(iteration)
        wait_for(lambda: daemon.run_stats("run")["window"]["iterations"] <= K, "old iterations leave")
        assert daemon.control("keep", "run").code == "ok"
        wait_for(lambda: list(tmp_path.rglob("keeps.jsonl")), "the keep is in its file")
        daemon.stop(signal.SIGKILL)
        rank.disconnect()
        made.append(daemon := serve(tmp_path, 1))
        rank.path = daemon.path
        rank.connect()
        wait_for(lambda: not daemon.run_stats("run")["in_flight"], "the kept records are committed")
        assert ledger(daemon.run_stats("run")) == (18, 12, 0, {"expired": 6})
        rank.bye()
        rank.close()
        assert daemon.stop() == 0
    run = tmp_path / "store" / "run.zarr"
    assert kept_iterations(run) == [2, 3, 4, 5]
    assert sum(len(series) for series in Store(run).series) == 12
