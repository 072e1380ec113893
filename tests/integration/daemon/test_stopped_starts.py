"""A daemon that is told to stop while it takes up what a killed one left: it seals that first, or says what it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capd.cli.daemon.detached import _code_of_ended
from capd.cli.jobs.companion import Companion, _wait_ready
from tests.kit import forking
from tests.kit.daemon import DaemonProcess, Rank, daemons, payload, stored_payloads, wait_for
from tests.kit.tiers import rows

RUNS = ("left-0", "left-1", "left-2")
RECORDS = 40
UNSEALED = 8  # the exit code

Serve = Callable[..., DaemonProcess]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def serve(store: Path, runtime_dir: Path) -> Iterator[Serve]:
    """Starts daemons on the store. faults: CAPD_FAILPOINTS; timeout_s: to shut down."""
    with daemons() as made:

        def start(
            *options: str, faults: str = "", timeout_s: float = 30.0, wait: bool = True
        ) -> DaemonProcess:
            environ = {**os.environ, "CAPD_FAILPOINTS": faults, "CAPD_SHUTDOWN_TIMEOUT_S": str(timeout_s)}
            path = runtime_dir / "s.sock"
            made.append(DaemonProcess(store, path, *options, wait=wait, env=environ))
            return made[-1]

        yield start


@pytest.fixture
def left(serve: Serve) -> None:
    """Runs with acknowledged records that a killed daemon had not sealed."""
    daemon = serve()
    for run_id in RUNS:
        rank = Rank(daemon.path, run_id=run_id)
        rank.connect()
        rank.put(*range(1, RECORDS + 1))
        rank.expect_acks(*range(1, RECORDS + 1))
        rank.close()
    daemon.process.kill()
    daemon.process.wait()


def assert_sealed(store: Path) -> None:
    """Plain Zarr readers see every record, once."""
    for run_id in RUNS:
        assert stored_payloads(store / f"{run_id}.zarr") == [payload(n) for n in range(1, RECORDS + 1)]
    assert not list(store.glob("*.zarr/.capd/*/spool/*"))


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize(
    "at",
    rows(["recover.after_partials", "recover.after_seals", "recover.after_logs"], ["recover.after_seals"]),
)
@pytest.mark.parametrize("name", rows(["term", "hup", "int"], ["term"]))
def test_a_signal_while_the_first_run_is_recovered_ends_it_with_all_sealed(
    name: str, at: str, store: Path, serve: Serve
) -> None:
    daemon = serve(faults=f"{at}={name}", wait=False)
    assert daemon.process.wait(60) == 0, daemon.text()
    assert f"stopping (SIG{name.upper()})" in daemon.text()
    assert "Traceback" not in daemon.text()
    assert_sealed(store)


@pytest.mark.usefixtures("left")
def test_a_second_sigterm_while_it_goes_on_changes_nothing(store: Path, serve: Serve) -> None:
    daemon = serve(
        faults="recover.after_partials=term,recover.after_logs=term,seal.after_rename=term", wait=False
    )
    assert daemon.process.wait(60) == 0, daemon.text()
    assert_sealed(store)


@pytest.mark.usefixtures("left")
def test_runs_that_it_has_no_time_for_are_named_with_their_records_and_the_way_on(
    store: Path, serve: Serve
) -> None:
    daemon = serve(faults="recover.after_partials=hang@2", timeout_s=1.0)
    wait_for(lambda: "run left-1 was left unsealed" in daemon.text(), "the second run is reached")
    assert daemon.stop() == UNSEALED, daemon.text()
    says = daemon.text()
    assert f"do not see {2 * RECORDS} records yet, of runs left-1 ({RECORDS}), left-2 ({RECORDS})" in says
    assert f"`capd serve --store {store}`" in says
    assert f"`capd verify {store} --adopt n`" in says
    assert len(stored_payloads(store / "left-0.zarr")) == RECORDS

    assert serve().stop() == 0
    assert_sealed(store)


@pytest.mark.usefixtures("left")
def test_what_it_names_as_the_way_on_seals_what_was_left(store: Path, serve: Serve) -> None:
    daemon = serve(faults="recover.after_partials=hang", timeout_s=0.2)
    assert daemon.stop() == UNSEALED, daemon.text()
    assert f"{3 * RECORDS} records" in daemon.text()
    command = [sys.executable, "-m", "capd", "verify", str(store), "--adopt", "n"]
    assert forking.run(command, timeout=60, capture_output=True, check=False).returncode == 0
    assert_sealed(store)


def test_a_seal_that_takes_too_long_leaves_records_and_says_how_many(store: Path, serve: Serve) -> None:
    daemon = serve(faults="seal.before_index=hang", timeout_s=0.5)
    rank = Rank(daemon.path)
    rank.connect()
    rank.put(*range(1, RECORDS + 1))
    rank.expect_acks(*range(1, RECORDS + 1))
    rank.bye()
    rank.close()
    assert daemon.stop() == UNSEALED, daemon.text()
    assert f"do not see {RECORDS} records yet, of run run ({RECORDS})" in daemon.text()
    assert serve().stop() == 0
    assert len(stored_payloads(store / "run.zarr")) == RECORDS


def test_a_hangup_that_is_ignored_stays_so(serve: Serve) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        daemon = serve()
    finally:
        signal.signal(signal.SIGHUP, before)
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.stats()["pid"] == daemon.process.pid
    assert daemon.stop() == 0
    assert "stopping (SIGTERM)" in daemon.text()


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("moment", rows(["capd-run-*", "capd-run-*/capd.sock"], ["capd-run-*/capd.sock"]))
@pytest.mark.parametrize("number", rows([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], [signal.SIGHUP]))
def test_capd_run_that_is_ended_while_its_daemon_starts_leaves_no_process_and_loses_nothing(
    number: signal.Signals, moment: str, store: Path, runtime_dir: Path, serve: Serve
) -> None:
    command = [sys.executable, "-m", "capd", "run", "--store", str(store), "--", "sleep", "600"]
    environ = {**os.environ, "CAPD_NODE": "n"}
    process = forking.popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)
    try:
        wait_for(lambda: list(runtime_dir.glob(moment)), moment)
        process.send_signal(number)
        _, says = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (128 + number, 130 if number == signal.SIGINT else 0), says
    assert b"Traceback" not in says
    assert not list(runtime_dir.glob("capd-run-*"))
    if moment.endswith("sock"):  # the daemon owned the store already
        assert_sealed(store)
    assert serve().stop() == 0
    assert_sealed(store)


def test_a_daemon_that_is_told_to_stop_before_it_answers_did_not_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whoever waits for it is not told of a "signal 0", nor that it listens."""
    for code in (0, UNSEALED):
        process = subprocess.Popen(["sh", "-c", f"exit {code}"])
        process.wait(10)
        _wait_ready(Companion(f"unix:{tmp_path / 'no.sock'}", "r", None), process)
        assert "was stopped while it started; the job runs without capture" in capsys.readouterr().err
    assert _code_of_ended(0) == 1
    assert "was stopped before it answered" in capsys.readouterr().err
    assert [_code_of_ended(UNSEALED << 8), _code_of_ended(signal.SIGTERM)] == [UNSEALED, 128 + 15]
