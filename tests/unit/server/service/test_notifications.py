"""The notifications to a service manager, against a datagram socket that stands for systemd's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from capd.server.service.notifications import Notifications


@dataclass
class Worker:
    """A thread with checkpoints, as the append thread has."""

    checkpoints: int = 1
    native_id: int | None = None


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def messages(self) -> list[str]:
        """The messages that have arrived."""
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096, socket.MSG_DONTWAIT).decode())
            except BlockingIOError:
                return found

    def wait(self) -> str:
        """The next message."""
        self._socket.settimeout(30)
        try:
            return self._socket.recv(4096).decode()
        finally:
            self._socket.settimeout(None)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@capd-test-{os.getpid()}"
    made = Manager(address)
    yield made
    made.close()


def notifications(manager: Manager, **variables: str) -> Notifications:
    return Notifications({"NOTIFY_SOCKET": manager.address, **variables})


def test_the_manager_hears_ready_and_the_status(manager: Manager) -> None:
    with notifications(manager) as sender:
        sender.ready()
        sender.tick(Worker(), lambda: "2 runs, 16 ranks, 0 dropped")
        sender.tick(Worker(), lambda: "at most every few seconds")

    assert manager.messages() == ["READY=1", "STATUS=2 runs, 16 ranks, 0 dropped"]


def test_the_watchdog_is_fed_only_while_the_append_thread_passes_checkpoints(manager: Manager) -> None:
    worker = Worker()
    with notifications(manager, WATCHDOG_USEC="1", WATCHDOG_PID=str(os.getpid())) as sender:
        sender.tick(worker, str)
        assert "WATCHDOG=1" in manager.messages()
        for _ in range(3):
            sender.tick(worker, str)
        assert manager.messages() == []
        worker.checkpoints += 1
        sender.tick(worker, str)
        assert manager.messages() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    ("stats", "expected"),
    [(["D 5", "D 5"], ["WATCHDOG=1"]), (["S 5", "R 6"], ["WATCHDOG=1"]), (["S 5", "S 5"], [])],
    ids=["waits for the disk", "computes", "stands still"],
)
def test_between_checkpoints_a_thread_that_works_or_waits_for_the_disk_is_alive(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, stats: list[str], expected: list[str]
) -> None:
    """The lines are those of proc(5): state, 10 fields, user and system time."""
    worker = Worker(native_id=7)
    with monkeypatch.context() as kernel, notifications(manager, WATCHDOG_USEC="1") as sender:
        for stat in stats:
            state, ticks = stat.split()
            line = f"7 (a ) name) {state} {'0 ' * 10} {ticks} 1 0"
            kernel.setattr(Path, "read_text", lambda _path, line=line: line)
            manager.messages()
            sender.tick(worker, str)
        assert manager.messages() == expected


@pytest.mark.parametrize(
    "variables",
    [{}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}],
    ids=["no watchdog", "another process's", "no number"],
)
def test_a_watchdog_of_nobody_here_is_not_fed(manager: Manager, variables: dict[str, str]) -> None:
    with notifications(manager, **variables) as sender:
        sender.tick(Worker(), str)

    assert "WATCHDOG=1" not in manager.messages()


def test_a_stop_asks_for_time_while_it_makes_progress(manager: Manager) -> None:
    worker = Worker()
    with notifications(manager) as sender:
        sender.stopping(worker, within_s=60)
        assert manager.wait() == "STOPPING=1"
        assert manager.wait() == "EXTEND_TIMEOUT_USEC=15000000\nWATCHDOG=1"

    assert manager.messages() == []


def test_a_stop_that_takes_longer_than_it_may_asks_for_no_more(manager: Manager) -> None:
    """An idle worker passes checkpoints, so a stop that hangs elsewhere would never be ended."""
    with notifications(manager) as sender:
        sender.stopping(Worker(), within_s=0)

    assert manager.messages() == ["STOPPING=1"]


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    with Notifications({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"}) as sender:
        sender.ready()
        sender.tick(Worker(), str)
        sender.stopping(Worker(), within_s=60)


def test_no_child_process_inherits_the_variables() -> None:
    environ = {"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    with Notifications(environ):
        assert environ == {"HOME": "/"}
