"""The page while a real daemon captures real ranks: counters, newest records, the daemon killed and back, streams."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.processes import Daemon, StartRank
from tests.kit.web.page import WebPage, web_page

MAX_CLIENTS = 64


@pytest.fixture
def made() -> Iterator[list[DaemonProcess]]:
    with daemons() as found:
        yield found


def until(states: Iterator[Any], test: Callable[[Any], Any], what: str) -> Any:
    """The first state for which the test holds."""
    began = time.monotonic()
    for state in states:
        if test(state):
            return state
        assert time.monotonic() - began < 30, f"not within 30 s: {what}; {state}"
    raise AssertionError(f"the stream ended before: {what}")


def runs_of(state: Any) -> list[Any]:
    return [] if state["node"] is None else state["node"]["runs"]


def test_ranks_of_a_job_are_counted_and_their_records_listed(
    daemon: Daemon, start_rank: StartRank, tmp_path: Path
) -> None:
    ranks = [start_rank(number) for number in (0, 1)]
    for rank in ranks:
        rank.ask("capture 0 5")
        rank.ask("flush")
    with web_page(daemon.store, tmp_path, endpoint=daemon.socket) as page, page.stream() as states:
        state = until(
            states, lambda one: [run["committed"] for run in runs_of(one)] == [10], "10 records are committed"
        )
        [run] = runs_of(state)
        assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
        assert {rank["state"] for rank in run["ranks"]} == {"live"}
        assert state["daemon"] == "live"
        assert state["node"]["room"] > 0
        state = until(
            states, lambda one: len(one["newest"][run["name"]]["records"]) == 10, "10 newest records"
        )
        assert {one["rank"] for one in state["newest"][run["name"]]["records"]} == {0, 1}
        [summary] = page.ask("runs")["runs"]
        assert (summary["state"], summary["ranks"]) == ("live", 2)
        found = page.ask("series", run=run["name"])
        assert found["total"] == len(found["series"]) > 0
        one = page.ask("tensor", run=run["name"], path=found["series"][0]["path"])["runs"][0]
        assert one["iteration"]
        for rank in ranks:
            rank.leave()
        until(
            states, lambda now: {rank["state"] for rank in runs_of(now)[0]["ranks"]} == {"ended"}, "both left"
        )


def test_the_page_keeps_the_last_values_of_a_killed_daemon(
    made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock"))
    rank = Rank(made[0].path)
    rank.connect()
    rank.put(0, 1)
    rank.expect_acks(0, 1)
    rank.count(offered=5, arena_full=3)
    with (
        web_page(tmp_path / "store", tmp_path, endpoint=made[0].path) as page,
        web_page(tmp_path / "store" / "run.zarr", runtime_dir, endpoint=made[0].path) as single,
        page.stream() as states,
    ):
        before = until(states, lambda one: runs_of(one) and runs_of(one)[0]["dropped"], "drops are shown")
        assert runs_of(before)[0]["dropped"] == {"arena_full": 3}
        made[0].stop(signal.SIGKILL)
        gone = until(states, lambda one: one["daemon"] == "gone", "the daemon is gone")
        assert runs_of(gone)[0]["ranks"] == runs_of(before)[0]["ranks"]
        assert gone["problem"]
        # The store answers all the same.
        assert page.ask("series", run="run")["total"] == 1
        made.append(DaemonProcess(tmp_path / "store", made[0].path))
        rank.connect()
        rank.put(2)
        rank.expect_acks(2)
        back = until(states, lambda one: one["daemon"] == "live" and runs_of(one), "the daemon is back")
        assert any("started again" in event["text"] for event in back["events"])
        assert single.ask("runs")["total"] == 1
    rank.close()


def test_other_stores_of_the_daemon_are_not_shown(
    made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock"))
    rank = Rank(made[0].path)
    rank.connect()
    rank.put(0)
    rank.expect_acks(0)
    (tmp_path / "elsewhere").mkdir()
    with web_page(tmp_path / "elsewhere", tmp_path, endpoint=made[0].path) as page, page.stream() as states:
        state = next(states)
        assert (state["daemon"], state["node"], state["newest"]) == ("elsewhere", None, {})
    rank.close()


def opened(page: WebPage) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", page.port), timeout=30)
    sock.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {page.cookie}\r\n\r\n".encode())
    assert sock.recv(15) == b"HTTP/1.1 200 OK"
    return sock


def test_64_streams_one_of_them_stalled_and_sigterm(
    made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock"))
    rank = Rank(made[0].path)
    rank.connect()
    rank.put(0)
    rank.expect_acks(0)
    with web_page(tmp_path / "store", tmp_path, endpoint=made[0].path) as page, ExitStack() as stack:
        # It never reads on.
        stack.enter_context(opened(page))
        others = [stack.enter_context(opened(page)) for _ in range(MAX_CLIENTS - 1)]
        assert page.ask("health")["viewers"] == MAX_CLIENTS
        assert page.get("/events").status == 503
        for sock in others:
            found = b""
            while b"\ndata: " not in found:
                found += sock.recv(1 << 16)
        # Whoever leaves makes room.
        others.pop().close()
        wait_for(lambda: page.ask("health")["viewers"] < MAX_CLIENTS, "a place is free")
        stack.enter_context(opened(page))
        assert page.memory_nbytes() < 256 << 20
        began = time.monotonic()
        assert page.stop() == 0
        assert time.monotonic() - began < 3
        assert page.err().count("\n") == 1
    rank.close()


def test_a_stream_that_never_reads_holds_up_nobody(
    made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock"))
    with web_page(tmp_path / "store", tmp_path, endpoint=made[0].path) as page:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect(("127.0.0.1", page.port))
        slow.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {page.cookie}\r\n\r\n".encode())
        with page.stream() as states:
            for _ in range(3):
                next(states)
        wait_for(lambda: page.ask("health")["viewers"] == 1, "only the slow one is left")
        slow.close()
        wait_for(lambda: page.ask("health")["viewers"] == 0, "the slow one has left")
