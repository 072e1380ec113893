"""Rules in a real daemon: an alert comes soon and names the right step and rank, in file, log, metric and command line.

Cooldowns survive a SIGKILL, a storm stays within its limit, and a rule that cannot be followed stops the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import capd
from capd.store.alerts.alert import Alert
from capd.store.alerts.file import alerts_of_run
from capd_client.protocol.control import Control, ControlReply
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Put
from tests.kit import forking
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.metrics.scrape import address_of, get
from tests.kit.paths import REPOSITORY
from tests.kit.store.cli import run_capd

JOB = Path(__file__).with_name("nan_job.py")
STEERED_JOB = JOB.with_name("steered_job.py")
Start = Callable[..., DaemonProcess]
NAN = '[[trigger]]\nname = "nan"\nmetric = "nan"\nabove = 0\nseverity = "critical"\n'


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    """Starts daemons with rules."""
    config = runtime_dir / "capd.toml"
    with daemons() as made:

        def start(rules: str, *options: str, head: str = "", **more: Any) -> DaemonProcess:
            config.write_text(f"[daemon]\nidle_seal_s = 0.2\n{head}\n{rules}")
            made.append(
                DaemonProcess(
                    runtime_dir / "store", runtime_dir / "s.sock", "--config", str(config), *options, **more
                )
            )
            return made[-1]

        yield start


@pytest.fixture
def rank(runtime_dir: Path) -> Iterator[Rank]:
    made = Rank(runtime_dir / "s.sock")
    yield made
    made.close()


def put(rank: Rank, iteration: int, *values: float, key_id: int = 0) -> None:
    """Capture four numbers of bfloat16."""
    codes = [struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in values]
    offset = PAGE_NBYTES + 64 * iteration
    rank.memory[offset : offset + 8] = struct.pack("<4H", *codes)
    rank.send(Put([Descriptor(iteration, offset, 8, key_id, (4,), Moment(iteration=iteration))]))
    rank.expect_acks(iteration)


def held(run: Path) -> list[Alert]:
    return alerts_of_run(run) if run.exists() else []


def after(run: Path, count: int) -> list[Alert]:
    """The alerts of a run once there are so many."""
    return wait_for(lambda: len(found := held(run)) >= count and found, f"{count} alerts")  # type: ignore[no-any-return]


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])


def has_order(daemon: DaemonProcess) -> bool:
    """Whether the only rank has an order and has received it."""
    reply = daemon.ask(Control("status", "run"))
    assert isinstance(reply, ControlReply)
    return any(rank["pending"] and rank["received"] for rank in reply.ranks)


@contextlib.contextmanager
def job(
    daemon: DaemonProcess, *words: str, script: Path = JOB, ranks: int = 2
) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a job."""
    shared = {k: v for k, v in os.environ.items() if not k.startswith("CAPD_")} | {
        "CAPD_ENDPOINT": f"unix:{daemon.path}", "CAPD_RUN_ID": "run", "PYTHONPATH": str(REPOSITORY),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
    }  # fmt: skip
    started = [
        forking.popen(
            [sys.executable, str(script), *words], env={**shared, "RANK": str(number)}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, imports=forking.TRAINING,
        )
        for number in range(ranks)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


def test_a_nan_at_one_step_of_one_rank_is_an_alert_within_three_seconds(start: Start, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = (
        "import sys, os, json; found = json.load(sys.stdin), dict(os.environ), os.listdir('/proc/self/fd'); "
        "json.dump(found, open(sys.argv[1], 'w'))"
    )
    command = json.dumps([sys.executable, "-c", script, str(said)])
    daemon = start(f"{NAN}command = {command}\n", "--metrics", "127.0.0.1:0")
    run = daemon.store / "run.zarr"
    with job(daemon, "40", "23", "1") as ranks:
        assert ranks[1].stdout is not None
        committed_ns = int(ranks[1].stdout.readline())
        [alert] = after(run, 1)
        assert alert.time_ns - committed_ns < 3e9
        assert (alert.rule, alert.severity, alert.rank, alert.iteration, alert.value) == (
            "nan", "critical", 1, 23, 1.0,
        )  # fmt: skip
        assert "/rank1/" in alert.series
        assert alert.count == len(alert.series_paths) > 3
        assert all(one.stdout is not None and one.stdout.readline() == "done\n" for one in ranks)

        # Log, metric, STATS and the command line say the same.
        # The alert is in its file before it is logged.
        [line] = wait_for(
            lambda: [line for line in daemon.text().splitlines() if "[trigger] run run: nan" in line],
            "the line",
        )
        assert "rank 1, iteration 23" in line
        name = (
            "capd_alerts_total",
            frozenset({("run_id", "run"), ("rule", "nan"), ("severity", "critical")}),
        )
        wait_for(lambda: get(address_of(daemon)).samples.get(name) == 1, "the metric")
        stats = daemon.stats()["alerts"]
        assert (stats["alerts"], stats["last"], stats["records_left_out"]) == (1, alert.text, 0)
        shown = run_capd("stats", CAPD_ENDPOINT=f"unix:{daemon.path}")
        assert "1 alert of 1 rule" in shown.out
        [plain] = json.loads(run_capd("alerts", str(run), "--json").out)
        assert (plain["iteration"], plain["rank"], plain["text"]) == (23, 1, alert.text)

        # The command got the alert, few variables and no descriptor of the daemon.
        wait_for(lambda: said.exists() and said.read_text().endswith("]"), "the command")
        told, environment, descriptors = json.loads(said.read_text())
        assert told["iteration"] == 23
        assert not [name for name in environment if name.startswith(("CAPD_", "AWS_"))]
        assert len(descriptors) <= 4
    assert daemon.stop() == 0
    assert capd.open(run).alerts == [alert]
    # Another NaN followed within the cooldown, if at all.
    assert {one.iteration for one in held(run)} == {23}
    verified = run_capd("verify", str(run))
    assert (verified.code, "not part" in verified.out + verified.err) == (0, False)


@pytest.mark.parametrize(("action", "steps"), [("stop-capture", "all"), ("capture", "0-11")])
def test_a_rule_stops_and_begins_the_capture_of_a_job(start: Start, action: str, steps: str) -> None:
    daemon = start(f'{NAN}action = "{action}"\n')
    run = daemon.store / "run.zarr"
    with job(daemon, steps, script=STEERED_JOB, ranks=1) as [rank]:
        assert rank.stdin is not None
        assert rank.stdout is not None
        # The rank waits, so that the order is there before its next step.
        wait_for(lambda: has_order(daemon), "the order")
        [said] = wait_for(
            lambda: re.findall(r"nan: \S+: ordered from iteration (\d+) on", daemon.text()), "the line"
        )
        rank.stdin.write("go on\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == "done\n"
    assert daemon.stop() == 0
    first = int(said)
    [weights] = capd.open(run).find(tensor_name="weight")
    captured = {record.iteration for record in weights.records}
    assert 11 < first < 300
    assert captured == set(range(first)) if action == "stop-capture" else {*range(12), *range(first, 300)}


def test_cooldowns_and_alerts_survive_a_kill_of_the_daemon(start: Start, rank: Rank) -> None:
    daemon = start(NAN)
    run = daemon.store / "run.zarr"
    rank.connect()
    put(rank, 5, 1, 2, float("nan"), 4)
    [first] = after(run, 1)
    daemon.stop(signal.SIGKILL)
    with (run / ".capd" / "node=n" / "alerts.jsonl").open("ab") as file:
        file.write(b'{"time_ns":17')

    daemon = start(NAN)
    rank.disconnect()
    rank.connect()
    # Within the cooldown, then after it.
    put(rank, 6, 1, 2, float("nan"), 4)
    put(rank, 105, 1, 2, float("nan"), 4)
    assert [one.iteration for one in after(run, 2)] == [5, 105]
    assert held(run)[0] == first
    assert daemon.stats()["alerts"]["suppressed"] == 1
    rank.bye()
    assert daemon.stop() == 0
    assert [one.iteration for one in held(run)] == [5, 105]
    assert run_capd("verify", str(run)).code == 0


def test_a_storm_stays_within_the_limit_of_a_day_and_commits_everything(start: Start, rank: Rank) -> None:
    daemon = start(f"{NAN}cooldown = 0\nmax_per_day = 7\n")
    run = daemon.store / "run.zarr"
    rank.connect()
    for iteration in range(300):
        put(rank, iteration, float("nan"), 2, 3, 4)
    rank.count(offered=300)
    rank.bye()
    assert daemon.stop() == 0
    found = held(run)
    assert [one.iteration for one in found] == list(range(7))
    assert found[-1].text.endswith("the last alert of this rule for today (max_per_day)")
    assert daemon.text().count("[trigger] run run") == 7
    assert len(capd.open(run).series[0]) == 300


def test_a_rank_that_falls_silent_is_an_alert_once(start: Start, rank: Rank) -> None:
    daemon = start('[[trigger]]\nname = "quiet"\nmetric = "silent"\nabove = 1.5\nseverity = "info"\n')
    rank.connect()
    put(rank, 0, 1, 2, 3, 4)
    [alert] = after(daemon.store / "run.zarr", 1)
    assert (alert.metric, alert.rank, alert.series, alert.count) == ("silent", 0, "", 0)
    assert isinstance(alert.value, float)
    assert alert.value > 1.5
    rank.count(offered=1)
    wait_for(lambda: daemon.stats()["uptime_s"] > 6, "some more looks")
    assert len(held(daemon.store / "run.zarr")) == 1


def test_lost_captures_are_an_alert_and_chosen_ones_are_not(start: Start, rank: Rank) -> None:
    daemon = start('[[trigger]]\nname = "lost"\nmetric = "drops"\nabove = 2\n')
    rank.connect()
    put(rank, 0, 1, 2, 3, 4)
    wait_for(lambda: daemon.stats()["uptime_s"] > 2, "a look")
    rank.count(offered=100, sampled=50, arena_full=3)
    [alert] = after(daemon.store / "run.zarr", 1)
    assert (alert.rule, alert.value, alert.limit) == ("lost", 3.0, 2.0)


def test_a_scalar_spike_is_an_alert(start: Start, rank: Rank) -> None:
    rule = '[[trigger]]\nname = "spike"\nmetric = "scalar:loss"\nfactor_above = 1.3\n'
    daemon = start(rule + "baseline = {iterations = 10, min = 5}\n")
    rank.connect()
    key = Key(
        quant_type="scalar", rank=0, tensor_name="loss", phase="post", layer_type="scalar", operation="step"
    )
    rank.send(Define(id=1, key=key, dtype="float64"))
    for iteration in range(12):
        offset = PAGE_NBYTES + 64 * iteration
        rank.memory[offset : offset + 8] = struct.pack("<d", 9.5 if iteration == 9 else 2.0)
        rank.send(Put([Descriptor(iteration, offset, 8, 1, (), Moment(iteration=iteration))]))
        rank.expect_acks(iteration)
    [alert] = after(daemon.store / "run.zarr", 1)
    assert (alert.iteration, alert.value, alert.limit) == (9, 9.5, pytest.approx(2.6))


@pytest.mark.parametrize(
    ("rule", "head", "said"),
    [
        (f'{NAN}action = "keep"\n', "", 'action: "keep" needs [window]'),
        (NAN, "statistics = false", "nan needs statistics = true"),
        (NAN.replace('"nan"\nabove', '"nann"\nabove'), "", "did you mean nan?"),
    ],
)
def test_a_rule_that_cannot_be_followed_stops_the_start(
    start: Start, rule: str, head: str, said: str
) -> None:
    daemon = start(rule, head=head, wait=False)
    assert daemon.process.wait(30) == 2
    [line] = [line for line in daemon.text().splitlines() if said in line]
    assert line.startswith(f"capd: {daemon.path.with_name('capd.toml')}: trigger 'nan': ")
    checked = run_capd("config", "check", str(daemon.path.with_name("capd.toml")))
    assert (checked.code, said in checked.out) == (2, True)
    checked = run_capd("rules", "check", "--config", str(daemon.path.with_name("capd.toml")))
    assert (checked.code, said in checked.out) == (2, True)


def test_a_daemon_without_rules_imports_none() -> None:
    script = (
        "import sys, capd.server.daemon, capd.cli.daemon.serve; from capd.config import load_triggers; "
        "assert load_triggers({}) == (); "
        "print([name for name in sys.modules if name.startswith(('capd.rules', 'capd.server.rules.watch'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd="/", env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_a_command_that_hangs_or_is_missing_delays_nothing(start: Start, rank: Rank) -> None:
    daemon = start(
        f'{NAN}cooldown = 0\ncommand = ["sleep", "600"]\n'
        '[[trigger]]\nname = "gone"\nmetric = "nan"\nabove = 0\ncooldown = 0\ncommand = ["/nowhere/it"]\n'
    )
    rank.connect()
    for iteration in range(3):
        put(rank, iteration, float("nan"), 2, 3, 4)
    assert len(after(daemon.store / "run.zarr", 6)) == 6
    tasks = Path(f"/proc/{daemon.process.pid}/task")

    def running() -> list[str]:
        return [text for one in tasks.glob("*/children") for text in one.read_text().split()]

    # The command follows the line in the file. The other one cannot be run.
    [child] = wait_for(running, "the command")
    rank.bye()
    assert daemon.stop() == 0
    assert not Path(f"/proc/{child}").exists()
