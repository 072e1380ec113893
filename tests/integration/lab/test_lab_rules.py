"""Rules on the errors of formats in a real daemon: an alert names the record, and its value is that of the record."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import capd
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import alerts_of_run
from tests.kit.live.lab_worker import hurry
from tests.kit.processes import Daemon, until

RULES = """
[daemon]
statistics = false
[lab]
formats = ["mxfp8", "mxfp4"]
sample = "1/1"
cpu = "100%"
[[trigger]]
name = "coarse"
metric = "sqnr:mxfp8"
below = 20
severity = "critical"
cooldown = 0
[[trigger]]
name = "zeros"
metric = "underflow:mxfp4"
above = 0.5
tensors = ["input"]
cooldown = 0
"""
# At step 3 of rank 1, one value of each block of the input is so large that all others become zero.
JOB = """
import os, torch, capd_client
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
for step in range(6):
    for name in ("input", "weight"):
        values = torch.randn(64, 64)
        if (rank, step, name) == (1, 3, "input"):
            values *= 1e-3
            values.view(-1, 32)[:, 5] = 100.0
        capd_client.capture(values, tensor_name=name, iteration=step)
    assert capd_client.flush(timeout_s=60)
capd_client.close()
"""
Start = Callable[[str], Daemon]


@pytest.fixture
def start(tmp_path: Path, runtime_dir: Path) -> Iterator[Start]:
    """Starts daemons with a capd.toml."""
    made: list[Daemon] = []

    def begin(text: str) -> Daemon:
        config = tmp_path / "capd.toml"
        config.write_text(text)
        made.append(Daemon(tmp_path / "store", runtime_dir, "--config", str(config)).start())
        return made[-1]

    yield begin
    for daemon in made:
        daemon.discard()


def job(daemon: Daemon, rank: int) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    subprocess.run(
        [sys.executable, "-c", JOB],
        env={
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]),
            "CAPD_ENDPOINT": daemon.endpoint,
            "CAPD_RUN_ID": "run",
        },
        check=True,
        timeout=100,
    )


def alerts(daemon: Daemon) -> list[Alert]:
    hurry(daemon.process)
    run = daemon.store / "run.zarr"
    return alerts_of_run(run) if run.exists() else []


def test_an_alert_names_the_record_whose_errors_are_outside(start: Start) -> None:
    daemon = start(RULES)
    for rank in (0, 1):
        job(daemon, rank)
    found = until(lambda: alerts(daemon), 100.0)
    [record_series] = [
        one
        for one in capd.open(daemon.store / "run.zarr").series
        if one.key.rank == 1 and one.key.tensor_name == "input"
    ]
    by_rule = {one.rule: one for one in found}
    assert set(by_rule) == {"zeros"}
    alert = by_rule["zeros"]
    assert (alert.rank, alert.iteration, alert.series, alert.count) == (1, 3, record_series.path, 1)
    daemon.stop()
    # The daemon that stops judges what it measures last.
    assert [(one.rule, one.rank, one.iteration) for one in alerts(daemon)] == [("zeros", 1, 3)]
    store = capd.open(daemon.store / "run.zarr")
    measured = {
        (one.key.rank, one.key.tensor_name, record.iteration): record.errors
        for one in store.series
        for record in one
    }
    assert len(measured) == 24
    errors = measured[1, "input", 3]["mxfp4"]
    assert alert.value == errors.underflows / errors.count
    assert max(
        each["mxfp4"].underflows / each["mxfp4"].count for at, each in measured.items() if at != (1, "input", 3)
    ) < 0.5  # fmt: skip


def test_what_waits_at_the_stop_is_measured_and_judged(start: Start) -> None:
    # So little CPU that the daemon has most copies when it stops; then it measures without a limit.
    daemon = start(RULES.replace('cpu = "100%"', 'cpu = "0.1%"').replace("below = 20", "below = 100"))
    job(daemon, 0)
    # Its process has begun.
    until(lambda: alerts(daemon), 100.0)
    daemon.stop()
    store = capd.open(daemon.store / "run.zarr")
    measured = {record.iteration for one in store.series for record in one if record.errors}
    assert measured
    assert {one.iteration for one in alerts(daemon)} == measured


def test_a_rule_on_a_format_that_the_lab_lacks_is_refused_with_what_it_has(tmp_path: Path) -> None:
    config = tmp_path / "capd.toml"
    config.write_text(RULES.replace('"mxfp8", ', '"hifp8", '))
    said = f"{config}: trigger 'coarse': metric: sqnr:mxfp8 needs mxfp8 in [lab] formats; it has hifp8, mxfp4"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    store, file = str(tmp_path / "store"), str(config)
    for words in (
        ["rules", "check", "--config", file],
        ["config", "check", file],
        ["serve", "--store", store, "--config", file],
        ["run", "--store", store, "--config", file, "--", "touch", str(tmp_path / "begun")],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "capd", *words], capture_output=True, text=True, check=False, env=environ
        )
        assert done.returncode == 2, (words, done)
        assert said in done.stdout + done.stderr, words
    assert not (tmp_path / "begun").exists()
