"""What samples derive from a daemon's counters. The daemon's side is `capd.metrics`, on a socket of the test."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from capd.live.events import MAX_EVENTS
from capd.live.sampler import Sampler
from capd.live.state import MAX_RUNS, main_reason
from capd.metrics import DaemonStats, RunStats, SessionStats
from capd_client.protocol.control import Stats, StatsReply
from capd_client.protocol.messages import MAX_FRAME_NBYTES, decode_client, encode


def session(rank: int, **changes: Any) -> SessionStats:
    values: dict[str, Any] = {
        "client": f"{rank:032x}", "rank": rank, "attempt": 0, "host": "h", "pid": 10 + rank, "state": "live",
        "end": "", "connected": True, "offered": 0, "committed": 0, "in_flight": 0, "dropped": {}, "clean": True,
    }  # fmt: skip
    return SessionStats(**{**values, **changes})


def run(run_id: str = "run", sessions: list[SessionStats] | None = None, **changes: Any) -> RunStats:
    values: dict[str, Any] = {
        "run_id": run_id, "path": f"/s/{run_id}.zarr", "offered": 0, "committed": 0, "in_flight": 0, "dropped": {},
        "records": 0, "statistics_records": 0, "scalar_records": 0, "raw_bytes": 0, "stored_bytes": 0,
        "sessions": sessions or [], "clean": True, "rate_mib_s": 0.0, "sealed": False, "why_full": "",
    }  # fmt: skip
    return RunStats(**{**values, **changes})


class Answers:
    """A daemon that answers STATS with what the test says, on a real socket."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid, self.now = path, 1, 0.0
        self.runs: list[RunStats] = []
        self.more: dict[str, Any] = {}
        self.alone: dict[str, RunStats] = {}
        self.beyond: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._connections: list[Connection] = []

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self.path.unlink()
        for connection in self._connections:
            # Its thread reads, unless the sampler hung up.
            with contextlib.suppress(OSError):
                sock = socket.socket(fileno=os.dup(connection.fileno()))
                with sock:
                    sock.shutdown(socket.SHUT_RDWR)
        self._listener, self._connections = None, []

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            peer.recv(1)
            connection = Connection(peer.detach())
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    asked = decode_client(connection.recv_bytes(MAX_FRAME_NBYTES))
                    assert isinstance(asked, Stats)
                    connection.send_bytes(encode(StatsReply(self._stats(asked.run_id))))
                except (OSError, EOFError):
                    return

    def _stats(self, run_id: str | None) -> dict[str, Any]:
        values: dict[str, Any] = {
            "version": "1", "pid": self.pid, "node": "n", "store": "/s", "endpoint": "unix:/e", "uptime_s": self.now,
            "threads": 1, "disk_free": 1000, "keep_free": 100, "max_disk": None, "connections": 1,
            "refused_connections": {}, "runs": self.runs if run_id is None else [self.alone[run_id]],
        }  # fmt: skip
        return DaemonStats(**{**values, **self.more}).model_dump(mode="json") | self.beyond


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[Answers]:
    answers = Answers(runtime_dir / "s.sock")
    answers.start()
    yield answers
    answers.stop()


@pytest.fixture
def sampler(daemon: Answers) -> Iterator[Sampler]:
    found = Sampler(daemon.path, clock=lambda: daemon.now, wall_ns=lambda: int(daemon.now * 1e9))
    yield found
    found.close()


def test_rates_are_derived_for_each_rank_and_run(daemon: Answers, sampler: Sampler) -> None:
    for second in range(4):
        daemon.now = float(second)
        daemon.runs = [
            run(sessions=[session(r, committed=second * (10 + r)) for r in (1, 0)], committed=21 * second)
        ]
        node = sampler.sample().node
    assert node is not None
    [found] = node.runs

    assert found.rate == 21
    assert [(rank.rank, rank.rate) for rank in found.ranks] == [(0, 10), (1, 11)]
    assert sampler.rates("run", points=60)[-3:] == [21, 21, 21]
    assert sampler.rates("run", found.ranks[1].client)[-1] == 11
    assert sampler.rates("run", "nobody") == [None] * 60


def test_a_rank_is_behind_the_front_and_keeps_its_last_iteration(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [run(sessions=[session(0, iteration=7), session(1, iteration=4), session(2)])]
    node = sampler.sample().node
    assert node is not None
    assert [(rank.iteration, rank.behind) for rank in node.runs[0].ranks] == [(7, 0), (4, 3), (None, None)]
    assert node.runs[0].iteration == 7

    daemon.runs = [
        run(sessions=[session(0, state="ended", connected=False), session(1, iteration=5, connected=False)])
    ]
    node = sampler.sample().node
    assert node is not None
    first, second = node.runs[0].ranks
    assert (first.state, first.iteration, first.behind) == ("ended", 7, None)
    assert (second.state, second.iteration, second.behind) == ("lost", 5, 0)
    # The front is among those that are there.
    assert node.runs[0].iteration == 5


def test_only_the_newest_attempt_of_a_rank_is_shown(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [
        run(sessions=[session(0, client="a" * 32, state="died"), session(0, attempt=1), session(1)])
    ]
    node = sampler.sample().node
    assert node is not None

    assert [(rank.rank, rank.attempt) for rank in node.runs[0].ranks] == [(0, 1), (1, 0)]
    assert node.runs[0].earlier == 1


def test_chosen_drops_are_no_losses(daemon: Answers, sampler: Sampler) -> None:
    dropped = {"sampled": 90, "arena_full": 3, "quota": 5, "ring_full": 0}
    daemon.runs = [run(sessions=[session(0, dropped=dropped)], dropped=dropped)]
    node = sampler.sample().node
    assert node is not None

    assert node.runs[0].dropped == {"arena_full": 3, "quota": 5}
    assert node.runs[0].left_out == node.runs[0].ranks[0].left_out == {"sampled": 90}
    assert main_reason(node.runs[0].ranks[0].dropped) == "quota"
    assert main_reason({}) == ""


@pytest.mark.parametrize(
    ("free", "stored", "max_disk", "room", "full_in_s"),
    [
        # 10 B/s go, 840 B above what is kept free are left.
        (lambda s: 1000 - 10 * s, lambda _: 0, None, 840, 84),
        # Another process makes room while captures take it: what captures take counts.
        (lambda _: 1000, lambda s: 20 * s, None, 900, 45),
        (lambda _: 1000, lambda s: 20 * s, 200, 80, 4),
        (lambda _: 1000, lambda _: 0, None, 900, None),
        (lambda _: 50, lambda _: 0, None, 0, None),
    ],
    ids=["disk", "captures", "max_disk", "at rest", "full"],
)
def test_the_disk_has_a_forecast(
    daemon: Answers, sampler: Sampler, free: Any, stored: Any, max_disk: Any, room: int, full_in_s: Any
) -> None:
    for second in range(7):
        daemon.now = float(second)
        daemon.more = {"disk_free": free(second), "max_disk": max_disk}
        daemon.runs = [run(stored_bytes=stored(second))]
        node = sampler.sample().node
        assert node is not None
        # Nothing is foretold from four seconds.
        assert second >= 5 or node.full_in_s is None

    assert (node.room, node.full_in_s) == (room, full_in_s)


def test_a_daemon_that_is_gone_leaves_its_last_values_and_comes_back(
    daemon: Answers, sampler: Sampler
) -> None:
    daemon.runs = [run(sessions=[session(0, committed=5)], committed=5)]
    before = sampler.sample()
    daemon.stop()
    daemon.now = 3.0
    gone = sampler.sample()

    assert gone.gone
    assert gone.node is before.node
    assert gone.silent_s == 3
    assert sampler.sample().problem.startswith(f"no daemon at {daemon.path}")

    daemon.pid = 2
    daemon.start()
    daemon.runs = [run(sessions=[session(0, committed=1)], committed=1)]
    back = sampler.sample()
    assert not back.gone
    assert back.node is not None
    assert back.node.runs[0].rate is None
    assert [event.text for event in sampler.events if "daemon" in event.text][-1] == (
        "the daemon was started again (pid 2)"
    )


def test_nothing_is_known_without_any_daemon(tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "no.sock")
    found = sampler.sample()

    assert found.node is None
    assert "start `capd serve`" in found.problem
    assert sampler.sample().silent_s == 0
    # It is said once, and not every second.
    assert len(sampler.events) == 1


def test_events_tell_of_ranks_that_come_and_go_and_of_drops(daemon: Answers, sampler: Sampler) -> None:
    def texts() -> list[str]:
        found = [event.text for event in sampler.events][texts.seen :]
        texts.seen += len(found)
        return found

    texts.seen = 0
    daemon.runs = [run(sessions=[session(0)])]
    sampler.sample()
    assert texts() == ["rank 0 here"]
    daemon.runs = [run(sessions=[session(rank) for rank in range(64)])]
    sampler.sample()
    assert texts() == ["ranks 1-63 joined"]
    daemon.runs = [
        run(
            sessions=[session(0), session(1, state="died", end="SIGKILL"), session(2, connected=False)],
            dropped={"arena_full": 2, "stopped": 9},
        )
    ]
    sampler.sample()
    assert texts() == [
        "rank 1 died (SIGKILL)", "rank 2 lost the connection", "2 captures dropped, arena_full",
    ]  # fmt: skip
    assert sampler.events[-3].severity == "critical"
    daemon.runs[0].dropped["arena_full"] = 7
    daemon.now = 2.0
    sampler.sample()
    assert texts() == []
    daemon.now = 11.0
    sampler.sample()
    assert texts() == ["5 captures dropped, arena_full"]
    daemon.now = 30.0
    sampler.sample()
    assert texts() == []


def test_samples_are_bounded(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [run("live", [session(0)]), *(run(f"run-{n}") for n in range(200))]
    node = sampler.sample().node
    assert node is not None
    # The live one stays, though it is the oldest.
    assert [found.run_id for found in node.runs] == [
        "live",
        *(f"run-{n}" for n in range(201 - MAX_RUNS, 200)),
    ]
    assert node.omitted_runs == 201 - MAX_RUNS

    for second in range(300):
        daemon.now = float(second)
        daemon.runs = [run("live", [session(0, connected=bool(second % 2))])]
        sampler.sample()
    assert len(sampler.events) == MAX_EVENTS
    assert sampler.events_total > MAX_EVENTS
    # Runs that are not there any more are forgotten.
    assert sampler.rates("run-199") == [None] * 60
    assert len(sampler._tracks) == 5


def test_ranks_that_do_not_fit_a_frame_are_asked_for_alone(daemon: Answers, sampler: Sampler) -> None:
    daemon.runs = [run(offered=3)]
    daemon.alone = {"run": run(sessions=[session(rank) for rank in range(1024)], offered=3)}
    node = sampler.sample().node
    assert node is not None
    assert len(node.runs[0].ranks) == 1024
    daemon.alone = {"run": run(offered=3)}
    node = sampler.sample().node
    assert node is not None
    assert node.runs[0].omitted_ranks == 1


def test_an_answer_of_another_version_is_a_problem_and_no_error(daemon: Answers, sampler: Sampler) -> None:
    daemon.beyond = {"of_a_later_version": 1}

    assert "another layout" in sampler.sample().problem
