"""Ranks come, go, die and return: nothing acknowledged is lost, nothing is written twice, counters add up."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import capd
from capd.server.rank.rank import MAX_IN_WORK_NBYTES
from capd.server.rank.session import RECORD_NBYTES
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import ARENA_BYTE, Descriptor, Ping, Pong, Put, Reject, Welcome, encode
from tests.kit.daemon import (
    DEFINE,
    DaemonProcess,
    Rank,
    daemons,
    open_socket,
    payload,
    receive,
    stored_payloads,
    tool,
    wait_for,
)
from tests.kit.paths import REPOSITORY
from tests.kit.processes import pause


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """Shared by the tests that do not end it; seals a run half a second after its last rank left."""
    directory = tmp_path_factory.mktemp("d")
    (directory / "capd.toml").write_text("[daemon]\nidle_seal_s = 0.5\n")
    started = DaemonProcess(
        directory / "store", directory / "s.sock", "--config", str(directory / "capd.toml")
    )
    yield started
    assert started.stop() == 0, started.text()
    assert "Traceback" not in started.text()


@pytest.fixture
def short(runtime_dir: Path) -> Path:
    return runtime_dir


Start = Callable[..., DaemonProcess]


@pytest.fixture
def start(short: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons on one store and socket; those a test leaves running are killed."""
    with daemons() as made:

        def start(*options: str, **more: Any) -> DaemonProcess:
            places = {"store": short / "store", "endpoint": short / "s.sock", **more}
            made.append(DaemonProcess(places["store"], places["endpoint"], *options, wait=False))
            if places.get("wait", True):
                made[-1].wait_ready()
            return made[-1]

        yield start


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made: list[Rank] = []
    yield made
    for rank in made:
        rank.close()


def adds_up(counters: dict[str, Any]) -> bool:
    total: int = counters["committed"] + counters["in_flight"] + sum(counters["dropped"].values())
    return bool(counters["offered"] == total)


def session_of(daemon: DaemonProcess, run_id: str) -> dict[str, Any]:
    [session] = daemon.run_stats(run_id)["sessions"]
    return dict(session)


def test_records_are_acknowledged_sealed_when_idle_and_readable_by_zarr(
    daemon: DaemonProcess, ranks: list[Rank]
) -> None:
    rank = Rank(daemon.path, run_id="plain")
    ranks.append(rank)
    welcome = rank.connect()
    assert (welcome.run_id, welcome.store) == ("plain", str(daemon.store / "plain.zarr"))
    rank.put(1, 2, 3)
    rank.count(offered=5, arena_full=2)
    rank.expect_acks(1, 2, 3)
    rank.bye()

    wait_for(lambda: daemon.run_stats("plain")["sealed"], "the idle run is sealed")

    assert stored_payloads(daemon.store / "plain.zarr") == [payload(1), payload(2), payload(3)]
    stats = daemon.run_stats("plain")
    assert (stats["offered"], stats["committed"], stats["dropped"]) == (5, 3, {"arena_full": 2})
    assert (stats["records"], stats["raw_bytes"]) == (3, 24)
    assert stats["sessions"][0]["state"] == "ended"
    assert stats["clean"]


def test_a_run_is_reopened_for_a_rank_that_comes_after_the_seal(
    daemon: DaemonProcess, ranks: list[Rank]
) -> None:
    for sequence in (1, 2):
        rank = Rank(daemon.path, run_id="reopened")
        ranks.append(rank)
        rank.connect()
        rank.put(sequence)
        rank.expect_acks(sequence)
        rank.bye()
        wait_for(lambda: daemon.run_stats("reopened")["sealed"], "sealed")

    assert stored_payloads(daemon.store / "reopened.zarr") == [payload(1), payload(2)]
    assert daemon.run_stats("reopened")["committed"] == 2


def test_a_newer_connection_takes_over_and_an_older_one_is_refused(
    daemon: DaemonProcess, ranks: list[Rank]
) -> None:
    rank = Rank(daemon.path, run_id="takeover")
    ranks.append(rank)
    rank.connect()
    rank.put(1)
    rank.expect_acks(1)
    old = rank.connection
    assert old is not None

    rank.connect()
    with pytest.raises((EOFError, ConnectionResetError)):  # the old connection is over
        receive(old)
    old.close()
    answer = rank.open(connection=1)

    assert isinstance(answer, Reject)
    assert answer.code == "superseded"
    rank.connect()
    rank.put(1, 2)
    rank.expect_acks(1, 2)
    assert session_of(daemon, "takeover")["committed"] == 2


def test_a_client_cannot_write_to_two_runs(daemon: DaemonProcess, ranks: list[Rank]) -> None:
    rank = Rank(daemon.path, run_id="mine")
    ranks.append(rank)
    rank.connect()
    answer = rank.open(run_id="another")
    assert isinstance(answer, Reject)
    assert answer.code == "run"


def test_ranks_without_a_run_name_share_one(daemon: DaemonProcess, ranks: list[Rank]) -> None:
    ranks += [Rank(daemon.path, rank=number, run_id=None) for number in range(2)]
    names = {rank.connect().run_id for rank in ranks}
    assert len(names) == 1


RANK_PROCESS = """
    import os, sys, time
    sys.path.insert(0, {here!r})
    from tests.kit.daemon import Rank
    from pathlib import Path
    rank = Rank(Path({path!r}), run_id={run_id!r})
    rank.connect()
    rank.put(1, 2)
    rank.expect_acks(1, 2)
    if {fork}:
        child = os.fork()  # inherits the socket and the arena, as a careless worker would
        if child == 0:
            time.sleep(600)
    rank.put(3)             # sent, its outcome never heard of
    rank.count(offered=9, in_flight=6, too_large=1)
    print(child if {fork} else 0, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "a forked child keeps the socket"])
def test_a_killed_rank_keeps_what_it_sent_and_the_rest_is_counted_as_rank_died(
    daemon: DaemonProcess, fork: bool
) -> None:
    run_id = f"killed-{fork}"
    script = RANK_PROCESS.format(here=str(REPOSITORY), path=str(daemon.path), run_id=run_id, fork=fork)
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()

    wait_for(lambda: session_of(daemon, run_id)["state"] == "died", "the death is noted")

    session = wait_for(lambda: (s := session_of(daemon, run_id))["in_flight"] == 0 and s, "at rest")
    assert (session["offered"], session["committed"]) == (9, 3)
    assert session["dropped"] == {"too_large": 1, "rank_died": 5}
    assert adds_up(session)
    wait_for(lambda: daemon.run_stats(run_id)["sealed"], "sealed")
    assert stored_payloads(daemon.store / f"{run_id}.zarr") == [payload(1), payload(2), payload(3)]
    if child:
        os.kill(child, signal.SIGKILL)


def test_the_store_root_and_the_socket_have_one_owner(
    daemon: DaemonProcess, short: Path, start: Start
) -> None:
    same_store = start(store=daemon.store, endpoint=short / "other.sock", wait=False)
    same_socket = start(store=short / "other", endpoint=daemon.path, wait=False)

    assert (same_store.process.wait(30), same_socket.process.wait(30)) == (7, 7)
    assert f"pid {daemon.process.pid}" in same_store.text()
    assert "another daemon listens" in same_socket.text()
    assert daemon.stats()["pid"] == daemon.process.pid


def test_unusable_endpoints_are_refused_in_one_line(short: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "capd", "serve", "--store", str(short / "s"), "--endpoint", f"unix:/tmp/{'x' * 120}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 3
    assert "107" in process.stderr
    assert "Traceback" not in process.stderr


def test_after_a_kill_the_next_daemon_knows_every_acknowledged_record(
    start: Start, ranks: list[Rank]
) -> None:
    first = start()
    rank = Rank(first.path, run_id=None)
    ranks.append(rank)
    rank.run_id = run_id = rank.connect().run_id
    rank.put(1, 2, 3)
    rank.count(offered=5, in_flight=5)
    rank.expect_acks(1, 2, 3)
    first.process.kill()
    first.process.wait()
    rank.disconnect()

    second = start()  # replaces the stale socket
    again = rank.open()
    assert isinstance(again, Welcome)
    assert again.run_id == run_id  # the name the killed daemon gave
    rank.send(DEFINE)
    rank.acked.clear()
    rank.put(2, 3, 4, 5)
    rank.expect_acks(2, 3, 4, 5)
    rank.count(offered=5)
    rank.bye()
    session = session_of(second, run_id)

    assert second.stop() == 0, second.text()
    assert (session["offered"], session["committed"], session["dropped"]) == (5, 5, {})
    assert stored_payloads(second.store / f"{run_id}.zarr") == [payload(n) for n in (1, 2, 3, 4, 5)]


def test_a_daemon_takes_up_what_a_killed_one_left_and_seals_it(
    short: Path, start: Start, ranks: list[Rank]
) -> None:
    (short / "capd.toml").write_text("[daemon]\nidle_seal_s = 0.2\n")
    first = start()
    rank = Rank(first.path, run_id="left")
    ranks.append(rank)
    rank.connect()
    rank.put(1, 2)
    rank.count(offered=3, in_flight=1)
    rank.expect_acks(1, 2)
    wait_for(lambda: session_of(first, "left")["offered"] == 3, "counters are seen")
    first.process.kill()
    first.process.wait()

    second = start("--config", str(short / "capd.toml"))
    wait_for(lambda: second.run_stats("left").get("sealed"), "taken up and sealed")
    assert second.stop() == 0

    assert stored_payloads(second.store / "left.zarr") == [payload(1), payload(2)]


def test_sigterm_drains_tells_the_ranks_seals_and_leaves_nothing_behind(
    start: Start, ranks: list[Rank]
) -> None:
    daemon = start()
    rank = Rank(daemon.path)
    ranks.append(rank)
    rank.connect()
    rank.put(*range(1, 60))

    assert daemon.stop() == 0

    rank.expect_acks(*range(1, 60))  # what was sent before is kept, and said so
    reject = rank.expect(Reject)
    assert isinstance(reject, Reject)
    assert (reject.code, reject.retry) == ("closing", True)
    assert not daemon.path.exists()
    assert list((daemon.store / "run.zarr").rglob("*.partial")) == []
    assert len(stored_payloads(daemon.store / "run.zarr")) == 59
    assert (daemon.store / ".capd-n.lock").read_bytes() == b""
    assert "Traceback" not in daemon.text()
    start().stop()


def test_ctrl_c_and_a_tool_stop_the_daemon_in_order(start: Start) -> None:
    daemon = start()
    assert daemon.stop(signal.SIGINT) == 0
    assert not daemon.path.exists()

    daemon = start()
    assert daemon.control("shutdown").ok
    assert daemon.process.wait(30) == 0
    assert not daemon.path.exists()


def test_a_stopped_daemon_goes_on_without_tearing_or_doubling_anything(
    daemon: DaemonProcess, ranks: list[Rank]
) -> None:
    rank = Rank(daemon.path, run_id="stopped")
    ranks.append(rank)
    rank.connect()
    rank.put(1)
    rank.expect_acks(1)
    pause(daemon.process.pid)
    try:
        rank.put(2, 3)  # into the socket of a connection that is given up below
        old = rank.connection
        assert old is not None
        old.close()
        rank.connection = None
        rank.ordinal += 1
        sock = open_socket(rank.path)
        socket.send_fds(sock, [ARENA_BYTE], [rank.fd])
        rank.connection = Connection(sock.detach())
        rank.send(rank.hello())
        rank.send(DEFINE)
        rank.put(2, 3, 4)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    rank.expect_acks(2, 3, 4)
    rank.count(offered=4)
    rank.bye()

    assert session_of(daemon, "stopped")["committed"] == 4
    assert daemon.control("seal", "stopped").ok
    assert stored_payloads(daemon.store / "stopped.zarr") == [payload(n) for n in (1, 2, 3, 4)]


def test_a_full_disk_budget_is_a_counted_drop_with_the_setting_to_raise(
    start: Start, ranks: list[Rank]
) -> None:
    daemon = start("--max-disk", "20")
    rank = Rank(daemon.path)
    ranks.append(rank)
    rank.connect()
    rank.put(1, 2, 3, 4)
    rank.listen_until(lambda: len(rank.acked) + len(rank.nacked) == 4, "every outcome")
    rank.count(offered=4)  # dies, for all the daemon knows, before it counts the NACKs
    rank.bye()
    session = session_of(daemon, "run")
    daemon.stop()

    assert rank.nacked
    assert all("--max-disk" in text for _, text in rank.nacked.values())
    assert session["dropped"] == {"disk_full": len(rank.nacked)}
    assert adds_up(session)


def test_a_flooding_rank_is_held_back_alone_and_a_second_ctrl_c_leaves_at_once(
    short: Path, start: Start, ranks: list[Rank]
) -> None:
    (short / "capd.toml").write_text('[daemon]\nstatistics = false\nstaging_bytes = "4MiB"\n')
    daemon = start("--config", str(short / "capd.toml"))
    flood, honest = Rank(daemon.path, run_id="flood"), Rank(daemon.path, run_id="honest")
    ranks += [flood, honest]
    flood.connect()
    honest.connect()
    sent, nbytes = [0], 300 << 10
    flood.memory[PAGE_NBYTES : PAGE_NBYTES + nbytes] = bytes(nbytes)

    def keep_sending() -> None:
        with contextlib.suppress(OSError):
            while True:  # every batch describes the same large slot 64 times
                batch = [
                    Descriptor(sent[0] + at, PAGE_NBYTES, nbytes, 0, (nbytes // 2,), Moment())
                    for at in range(64)
                ]
                flood.send(Put(batch))
                sent[0] += 64

    thread = threading.Thread(target=keep_sending)
    thread.start()
    flood.expect_acks(*range(64))
    assert (
        sent[0] - len(flood.acked) < 4 * MAX_IN_WORK_NBYTES // RECORD_NBYTES
    )  # unhindered, it sends that in a moment
    honest.put(1)
    honest.expect_acks(1)

    daemon.process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in daemon.text(), "the drain has begun")
    again = time.monotonic() + 0.4  # sooner, it would count as the same keypress
    wait_for(lambda: time.monotonic() > again, "some time has passed")
    assert daemon.process.poll() is None
    assert daemon.stop(signal.SIGINT) == 130
    thread.join()
    with contextlib.suppress(EOFError, ConnectionError):
        flood.listen_until(lambda: False, "the end of the connection")

    assert not daemon.path.exists()
    later = start()
    acked = len(flood.acked)
    spools = [later.store / f"{run}.zarr" / ".capd" / "node=n" / "spool" for run in ("flood", "honest")]
    wait_for(
        lambda: not any(file for spool in spools for file in spool.iterdir()), "all is taken up and sealed"
    )
    assert later.stop() == 0
    # Counted in the store: a run that was sealed to the last record is not taken up by the next daemon.
    assert capd.open(later.store / "flood.zarr").totals().records >= acked > 0
    assert len(stored_payloads(later.store / "honest.zarr")) == 1


def test_connections_are_limited_by_the_descriptors_there_are(start: Start, short: Path) -> None:
    daemon = DaemonProcess(
        short / "store",
        short / "s.sock",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(daemon.stop)
        answers = []
        for _ in range(40):
            connection = stack.enter_context(tool(daemon.path))
            with contextlib.suppress(BrokenPipeError):  # refused before it spoke; the answer is there
                connection.send_bytes(encode(Ping()))
            answers.append(receive(connection))
    refused = [answer for answer in answers if isinstance(answer, Reject)]

    assert 0 < len(refused) < 40
    assert all(answer.code == "peer" and answer.retry for answer in refused)
    assert answers.count(Pong()) == 40 - len(refused)
