"""What `capd ctl` says when nobody answers it, and of arguments that no daemon would accept."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capd.cli.daemon import ctl
from tests.kit.store.cli import Result

Capd = Callable[..., Result]


@pytest.fixture
def stopped(runtime_dir: Path) -> Iterator[Path]:
    """As of a daemon under SIGSTOP: the kernel takes connections for it until its queue is full."""
    path = runtime_dir / "s.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen(0)
        yield path


def test_a_daemon_that_is_stopped_is_told_from_one_that_is_not_there(
    capd: Capd, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctl, "_ANSWER_S", 0.1)
    endpoint = ("--endpoint", f"unix:{stopped}")
    silent = capd("ctl", "stop", "--no-wait", *endpoint)
    assert silent.code == 3
    assert "did not answer within 0.1 s" in silent.err
    assert "kill -CONT" in silent.err
    assert "may still be carried out" in silent.err

    queue = []
    try:
        while True:
            queue.append(waiting := socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            waiting.connect(str(stopped))
    except BlockingIOError:
        full = capd("ctl", "status", *endpoint)
    finally:
        for waiting in queue:
            waiting.close()
    assert full.code == 3
    assert "takes no connection" in full.err
    assert "kill -CONT" in full.err
    assert "no daemon" not in full.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stop", "--at", str(2**63)), "--at"),
        (("status", "--run-id", "x" * 300), "longer than 128"),
        (("status", "--run-id", "\udcff"), "cannot be used"),
        (("seal", "--run-id", "../x"), "path separator"),
        (("select", "--modules", "\udcff"), "no glob"),
    ],
)
def test_what_no_daemon_would_accept_is_wrong_usage(
    capd: Capd, stopped: Path, arguments: tuple[str, ...], says: str
) -> None:
    found = capd("ctl", *arguments, "--endpoint", f"unix:{stopped}")

    assert found.code == 2
    assert says in found.err
