"""Kills and stops of either side: acked records stay, once and whole; counters are exact at rest."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import capd as capd_package
from capd_client.protocol import messages
from capd_client.protocol.control import Control, ControlReply, Stats, StatsReply
from tests.kit.checking import assert_balanced, captured_numbers
from tests.kit.processes import Daemon, Rank, StartRank, at_rest, capd, live_stats, until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "store" / "run.zarr"


def end_with_nothing_lost(rank: Rank, daemon: Daemon, run: Path) -> int:
    """End a streaming rank and its daemon; every capture must be stored once and counted. Returns how many."""
    total = rank.ask("halt")
    assert rank.ask("flush") is True
    counters = rank.ask("counters")
    rank.leave()
    daemon.stop()

    assert counters == {"offered": total, "committed": total, "in_flight": 0, "dropped": {}}
    assert captured_numbers(run, 0) == list(range(total))
    return total


def test_daemon_killed_in_mid_run_loses_and_repeats_nothing(
    daemon: Daemon, start_rank: StartRank, run: Path
) -> None:
    rank = start_rank()
    assert rank.ask("stream 0") == "streaming"
    for _ in range(3):
        before = rank.ask("counters")["committed"]
        until(lambda least=before + 20: rank.ask("counters")["committed"] >= least)
        daemon.kill()
        acked = rank.ask("counters")["committed"]
        assert set(range(acked)) <= set(captured_numbers(run, 0))  # nobody has recovered the store yet
        daemon.start()
    until(lambda: rank.ask("counters")["committed"] > acked + 20)

    total = end_with_nothing_lost(rank, daemon, run)
    stats = json.loads(capd("stats", str(run), "--json").stdout)
    assert_balanced(stats)
    assert stats["committed"] == total


@pytest.mark.slow
def test_one_rank_killed_the_other_goes_on_and_nothing_sent_is_lost(
    daemon: Daemon, start_rank: StartRank, run: Path
) -> None:
    victim, survivor = start_rank(0), start_rank(1)
    victim.ask("stream 0")
    survivor.ask("stream 0")
    until(lambda: min(r.ask("counters")["committed"] for r in (victim, survivor)) > 20)

    acked = victim.ask("counters")["committed"]
    victim.kill()

    at_kill = survivor.ask("counters")["committed"]
    until(lambda: survivor.ask("counters")["committed"] > at_kill + 50)
    total = survivor.ask("halt")
    assert survivor.ask("flush") is True
    survivor.leave()
    until(lambda: all(map(at_rest, live_stats(daemon.endpoint)["sessions"])))
    stats = live_stats(daemon.endpoint)
    daemon.stop()

    dead = next(s for s in stats["sessions"] if s["rank"] == 0)
    assert dead["state"] == "died"
    assert_balanced(dead)
    assert_balanced(stats)
    kept = captured_numbers(run, 0)
    assert kept == list(range(dead["committed"]))  # a prefix of what it captured, nothing torn or skipped
    assert dead["committed"] >= acked
    assert dead["dropped"].get("rank_died", 0) == dead["offered"] - dead["committed"]
    assert captured_numbers(run, 1) == list(range(total))


@pytest.mark.fault
def test_everything_killed_the_store_opens_and_the_next_daemon_carries_on(
    daemon: Daemon, start_rank: StartRank, run: Path
) -> None:
    rank = start_rank()
    rank.ask("stream 0")
    until(lambda: rank.ask("counters")["committed"] > 60)
    acked = rank.ask("counters")["committed"]
    daemon.kill()
    rank.kill()

    kept = captured_numbers(run, 0)
    listed = json.loads(capd("ls", str(run), "--json").stdout)
    stats = json.loads(capd("stats", str(run), "--json").stdout)
    assert kept == list(range(len(kept)))
    assert len(kept) >= acked
    assert sum(series["records"] for series in listed) == len(kept)
    assert stats["committed"] == len(kept)
    assert stats["clean"] is False

    daemon.start()
    until(lambda: not list((run / ".capd").glob("*/spool/*")))  # taken up and sealed by itself
    second = start_rank(1)
    second.ask("capture 0 10")
    assert second.ask("flush") is True
    second.leave()
    daemon.stop()
    assert captured_numbers(run, 0) == kept
    assert captured_numbers(run, 1) == list(range(10))
    sealed = sum(series.zarr().shape[0] for series in capd_package.open(run).series)
    assert sealed == len(kept) + 10


@pytest.mark.fault
def test_a_stopped_daemon_and_a_reconnecting_rank_tear_and_repeat_nothing(
    daemon: Daemon, start_rank: StartRank, run: Path
) -> None:
    rank = start_rank()
    rank.ask("stream 0")
    for _ in range(2):
        before = rank.ask("counters")["committed"]
        until(lambda least=before + 20: rank.ask("counters")["committed"] > least)
        connections = daemon.output().count("connected")
        daemon.send(signal.SIGSTOP)
        # Silence longer than three pings of a second: the rank gives the connection up and knocks again.
        stopped = threading.Event()
        stopped.wait(5)
        daemon.send(signal.SIGCONT)
        until(lambda least=connections: daemon.output().count("connected") > least)

    at = rank.ask("counters")["committed"]
    until(lambda: rank.ask("counters")["committed"] > at + 20)
    end_with_nothing_lost(rank, daemon, run)


def test_readers_during_capture_see_a_growing_prefix(
    daemon: Daemon, start_rank: StartRank, run: Path
) -> None:
    rank = start_rank()
    rank.ask("stream 0")
    until(lambda: rank.ask("counters")["committed"] > 10)

    seen = 0
    for look in range(6):
        acked = rank.ask("counters")["committed"]
        numbers = captured_numbers(run, 0)
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= max(acked, seen)
        seen = len(numbers)
        if look == 3:  # a seal in the middle: records move from the spool into shards while readers read
            capd_seal(daemon)
    rank.ask("halt")
    rank.ask("flush")
    rank.leave()
    daemon.stop()


def test_live_counters_add_up_in_every_sample(daemon: Daemon, start_rank: StartRank) -> None:
    rank = start_rank()
    rank.ask("stream 0")
    until(lambda: rank.ask("counters")["committed"] > 10)

    seen, samples, until_s = set(), 0, time.monotonic() + 60
    with connected(daemon) as connection:
        # On a busy machine, 500 answers may come before the rank gets its turn.
        while samples < 500 or (len(seen) <= 10 and time.monotonic() < until_s):
            samples += 1
            reply = asked(connection, Stats(None))
            assert isinstance(reply, StatsReply)
            [run] = reply.stats["runs"]
            for one in (run, *run["sessions"]):
                assert one["offered"] == one["committed"] + one["in_flight"] + sum(one["dropped"].values())
            seen.add(run["committed"])
    rank.ask("halt")
    rank.ask("flush")
    rank.leave()
    daemon.stop()

    assert len(seen) > 10, "the rank captured nothing meanwhile"


def capd_seal(daemon: Daemon) -> None:
    """Ask the daemon to seal, as a tool would."""
    with connected(daemon) as connection:
        reply = asked(connection, Control(verb="seal", run_id="run"))
    assert isinstance(reply, ControlReply)
    assert reply.ok, reply.message


def connected(daemon: Daemon) -> Connection:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(str(daemon.socket))
        plain.sendall(messages.TOOL_BYTE)
        return Connection(plain.detach())


def asked(connection: Connection, message: messages.ClientMessage) -> messages.DaemonMessage:
    connection.send_bytes(messages.encode(message))
    return messages.decode_daemon(connection.recv_bytes(messages.MAX_FRAME_NBYTES))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_daemon_leaves_nothing_behind(
    daemon: Daemon, start_rank: StartRank, run: Path, signum: int
) -> None:
    rank = start_rank()
    rank.ask("capture 0 40")
    assert rank.ask("flush") is True
    daemon.send(signum)
    assert daemon.process is not None
    assert daemon.process.wait(60) == 0

    assert "Traceback" not in daemon.output()
    assert not daemon.socket.exists()
    assert not list((run / ".capd").glob("*/spool/*"))
    assert not [p for p in run.rglob("*") if p.name.endswith((".tmp", ".partial", ".log", "-wal", "-shm"))]
    assert {oct(p.stat().st_mode & 0o777) for p in run.rglob("*") if p.is_file()} == {"0o600"}
    assert {oct(p.stat().st_mode & 0o777) for p in run.rglob("*") if p.is_dir()} == {"0o700"}
    rank.ask("capture 40 60")  # the rank goes on without a daemon
    rank.kill()
    assert captured_numbers(run, 0) == list(range(40))


def test_a_rank_without_a_daemon_trains_on_and_counts(tmp_path: Path, runtime_dir: Path) -> None:
    rank = Rank(f"unix:{runtime_dir}/nobody.sock", CAPD_POLICY="drop", CAPD_EXIT_TIMEOUT_S="0")
    rank.ask("capture 0 500")
    counters = rank.ask("counters")
    rank.leave()
    assert counters["offered"] == 500
    assert counters["offered"] == counters["in_flight"] + sum(counters["dropped"].values())


@pytest.mark.fault
def test_the_daemons_memory_stays_bounded(daemon: Daemon, start_rank: StartRank) -> None:
    ranks = [start_rank(number) for number in range(2)]
    for rank in ranks:
        rank.ask("stream 0")
    peak = 0
    until(lambda: min(r.ask("counters")["committed"] for r in ranks) > 300, timeout_s=60)
    peak = daemon.anonymous_nbytes()
    for rank in ranks:
        rank.ask("halt")
        rank.ask("flush")
        rank.leave()
    daemon.stop()
    assert peak < (256 << 20) + (256 << 20)
