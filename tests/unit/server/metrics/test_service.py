"""The service answers from its snapshot alone, says what is wrong, and starts nothing that nobody asked for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.config import DaemonSettings
from capd.errors import ConfigError
from capd.server.limits import DiskBudget
from capd.server.metrics import service as module
from capd.server.metrics.access import adopt
from capd.server.metrics.http_server import Request
from capd.server.metrics.service import Metrics, wants_openmetrics
from capd.server.metrics.snapshot import Snapshot
from tests.kit.daemon import wait_for
from tests.unit.server.metrics.test_text import run, snapshot


class Clock:
    """Takes snapshots that a test has prepared."""

    def __init__(self) -> None:
        self.next = self.now()
        self.taken = 0
        self.error: Exception | None = None

    @staticmethod
    def now(age_s: float = 0.0, **changes: object) -> Snapshot:
        return snapshot(run(), **{"taken": time.monotonic() - age_s, **changes})

    def take(self) -> Snapshot:
        self.taken += 1
        if self.error is not None:
            raise self.error
        return self.next


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budget(tmp_path: Path) -> DiskBudget:
    return DiskBudget(tmp_path, 10**12, 0)


@pytest.fixture
def metrics(runtime_dir: Path, clock: Clock, budget: DiskBudget) -> Iterator[Metrics]:
    made = Metrics(DaemonSettings(metrics=f"unix:{runtime_dir}/m.sock"))
    made.start(clock.take, budget, "n", 1)
    yield made
    made.close()


def ask(metrics: Metrics, path: str = "/metrics") -> tuple[int, str]:
    answer = metrics.answer(Request("GET", path, {}))
    return answer.status.value, answer.body.decode()


def test_an_answer_needs_no_lock_of_the_daemon(metrics: Metrics, clock: Clock, budget: DiskBudget) -> None:
    """While another thread holds the lock of the budget, and the clock takes no snapshot."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with budget._lock:
            held.set()
            assert done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    answers = [ask(metrics), ask(metrics, "/healthz")]
    done.set()
    holder.join()

    assert [status for status, _ in answers] == [200, 200]
    assert clock.taken == 1


def test_a_page_is_made_once_however_often_it_is_read(
    metrics: Metrics, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 3600.0)
    first = metrics.page(openmetrics=False)
    assert metrics.page(openmetrics=False) is first
    assert metrics.page(openmetrics=True) is not first
    clock.next = Clock.now(connections=77)
    metrics.stop_clock()

    assert b"capd_connections 77" in metrics.page(openmetrics=False)


def test_the_clock_takes_a_snapshot_only_when_the_last_one_is_old(
    metrics: Metrics, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 3600.0)
    metrics.tick()
    assert clock.taken == 1
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)
    metrics.tick()
    assert clock.taken == 2


def test_a_snapshot_that_fails_is_said_once_and_lets_the_daemon_stop(
    metrics: Metrics, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)
    clock.error = OSError("the disk does not answer")
    for _ in range(3):
        metrics.tick()
    metrics.stop_clock()

    assert ask(metrics)[0] == 200
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    clock.error = None
    clock.next = Clock.now(connections=77)
    metrics.tick()
    assert b"capd_connections 77" in metrics.page(openmetrics=False)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({}, "ok"), ({"store_failed": True}, "store_failed"), ({"refuses": True}, "disk_full"),
     ({"used_nbytes": 10**12}, "disk_full"), ({"age_s": 31.0}, "stalled")],
)  # fmt: skip
def test_health_is_one_word(
    runtime_dir: Path, clock: Clock, budget: DiskBudget, changes: dict[str, float], word: str
) -> None:
    clock.next = Clock.now(**changes)  # type: ignore[arg-type]
    metrics = Metrics(DaemonSettings(metrics=f"unix:{runtime_dir}/m.sock"))
    metrics.start(clock.take, budget, "n", 1)
    found, page = ask(metrics, "/healthz"), ask(metrics)
    metrics.stop_clock()
    stopping = ask(metrics, "/healthz")
    metrics.close()

    # Old figures do not pass for new ones.
    assert page[0] == (503 if word == "stalled" else 200)
    assert found == (200 if word == "ok" else 503, f"{word}\n")
    # A daemon that seals takes no snapshots, and must not be killed for that.
    assert stopping == (found if word != "stalled" else (200, "ok\n"))


def test_what_is_off_takes_no_snapshot_and_no_thread(clock: Clock, budget: DiskBudget) -> None:
    before = threading.active_count()
    metrics = Metrics(DaemonSettings())
    metrics.start(clock.take, budget, "n", 1)
    metrics.tick()
    metrics.stop_clock()
    metrics.close()

    assert (clock.taken, threading.active_count()) == (0, before)


def test_another_address_than_the_passed_socket_is_refused(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(str(runtime_dir / "m.sock"))
        given.listen()
        listening = adopt(given, None)
        with pytest.raises(
            ConfigError, match=rf"passed unix:{runtime_dir}/m.sock .* leave --metrics and CAPD_METRICS"
        ):
            Metrics(DaemonSettings(metrics="127.0.0.1:0"), listening)
        Metrics(DaemonSettings(metrics=listening.address), listening).close()


def test_a_file_that_cannot_be_used_leaves_no_socket(runtime_dir: Path) -> None:
    settings = DaemonSettings(metrics=f"unix:{runtime_dir}/m.sock", metrics_file=runtime_dir / "x.txt")
    with pytest.raises(Exception, match="must end in"):
        Metrics(settings)

    assert not (runtime_dir / "m.sock").exists()


def test_a_daemon_that_leaves_at_once_leaves_neither_socket_nor_file(
    runtime_dir: Path, clock: Clock, budget: DiskBudget
) -> None:
    settings = DaemonSettings(metrics=f"unix:{runtime_dir}/m.sock", metrics_file=runtime_dir / "capd.prom")
    metrics = Metrics(settings)
    metrics.start(clock.take, budget, "n", 1)
    wait_for((runtime_dir / "capd.prom").exists, "the file")
    metrics.unlink()
    left = list(runtime_dir.iterdir())
    metrics.close()

    assert left == []


def test_the_file_has_its_own_page(tmp_path: Path, clock: Clock, budget: DiskBudget) -> None:
    metrics = Metrics(DaemonSettings(metrics_file=tmp_path / "capd.prom"))
    metrics.start(clock.take, budget, "n", 1)
    wait_for((tmp_path / "capd.prom").exists, "the file")
    text = (tmp_path / "capd.prom").read_text()
    metrics.close()

    assert "capd_connections 3" in text
    assert "process_" not in text


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [("", False), ("*/*", False), ("text/plain", False), ("application/openmetrics-text", True),
     # As Prometheus 2.42 asks, and Prometheus 3.
     ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
      "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
     ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.5", True),
     ("application/openmetrics-text;version=0.0.1", False), ("application/openmetrics-text;q=0", False),
     ("application/openmetrics-text;q=0.2,text/plain;q=0.3", False), ("application/openmetrics-text;q=x", False),
     ('application/openmetrics-text; version="1.0.0"', True)],
)  # fmt: skip
def test_accept_is_weighed(accept: str, wanted: bool) -> None:
    assert wants_openmetrics({"accept": accept}) is wanted
