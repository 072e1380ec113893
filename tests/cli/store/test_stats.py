"""`capd stats`: from the store, live from a daemon, and across the daemon's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capd.cli.store import counters, stats_watch
from capd.cli.store.counters import Counters
from capd.cli.store.stats_view import which_run
from capd.metrics import NO_RANK
from capd.store.catalog.rows import LedgerRow
from capd_client.protocol.key import Key
from tests.kit import forking
from tests.kit.jobs.terminal import Terminal
from tests.kit.store.cli import Result, StoreWriter, linear_key, session_row

Capd = Callable[..., Result]
WaitUntil = Callable[..., None]

JOB = """
import sys, torch, capd_client
for micro_batch in range(5):
    capd_client.capture(torch.zeros(8), tensor_name="x", micro_batch=micro_batch)
capd_client.capture(torch.zeros(2, dtype=torch.complex64), tensor_name="c")
assert capd_client.flush(20)
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_stores_counters_come_with_the_documented_fields(capd: Capd, second: Path) -> None:
    found = capd("stats", second, "--json")

    assert set(found.json) == set(Counters.model_fields)
    assert {"offered", "committed", "in_flight", "dropped", "raw_bytes", "stored_bytes", "sessions"} <= set(
        found.json
    )
    assert (found.json["source"], found.json["offered"], found.json["committed"]) == ("store", 7, 6)
    assert found.json["dropped"] == {"arena_full": 1}
    assert found.json["raw_bytes"] == 112
    assert found.json["clean"]


def test_with_drops_the_first_line_says_so_and_names_the_setting_to_raise(capd: Capd, second: Path) -> None:
    first, *rest = capd("stats", second).out.splitlines()

    assert first.startswith("1 capture was dropped: 1 arena_full (raise CAPD_ARENA_BYTES")
    assert any(line.startswith("offered     7") for line in rest)


def test_what_was_left_out_by_choice_is_told_apart_from_what_was_lost(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.open("run")
    counted = {"sampled": 900, "arena_full": 1}
    drops = [drop(linear_key(), "sampled", 900, 0, 9), drop(linear_key(), "arena_full", 1, 5, 5)]
    writer.save_session("run", session_row(offered=901, committed=0, dropped=counted, drops=drops))
    writer.close()
    run = tmp_path / "run.zarr"

    first, *rest = capd("stats", run).out.splitlines()
    listed = capd("stats", run, "--drops").out.splitlines()

    assert first.startswith("1 capture was dropped: 1 arena_full (raise CAPD_ARENA_BYTES")
    assert "sampled" not in first
    assert "dropped     1 (1 arena_full)" in rest
    assert "left out    900 (900 sampled)" in rest
    assert rest[-1].split()[-2:] == ["1", "900"]  # of the rank
    assert [line.split()[:2] for line in listed[1:]] == [["arena_full", "1"], ["sampled", "900"]]
    assert capd("stats", run, "--json").json["dropped"] == counted


def test_counters_cut_off_by_a_kill_are_marked_unclean(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.open("killed")
    writer.save_session("killed", session_row(state="live", ended_ns=None))
    writer.close()

    found = capd("stats", tmp_path / "killed.zarr", "--json").json

    assert not found["clean"]
    assert not found["sessions"][0]["clean"]
    assert "unclean" in capd("stats", tmp_path / "killed.zarr").out


def test_without_daemon_and_store_the_exit_code_is_3_and_the_remedy_named(capd: Capd, tmp_path: Path) -> None:
    found = capd("stats", cwd=tmp_path)

    assert found.code == 3
    assert "capd serve" in found.err


@dataclass
class Live:
    """A daemon with one rank that captured five tensors and waits."""

    daemon: subprocess.Popen[bytes]
    store: Path


@pytest.fixture
def live(tmp_path: Path, runtime_dir: Path, wait_until: WaitUntil) -> Iterator[Live]:
    store, socket = tmp_path / "captures", runtime_dir / "capd" / "capd.sock"
    command = [sys.executable, "-m", "capd", "serve", "--store", str(store), "--run-id", "live"]
    with forking.popen(command, stderr=subprocess.DEVNULL) as daemon:
        try:
            wait_until(socket.exists, what="the daemon's socket")
            environ = {**os.environ, "CAPD_ENDPOINT": f"unix:{socket}", "CAPD_EXIT_TIMEOUT_S": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            with forking.popen([sys.executable, "-c", JOB], env=environ, **pipes) as job:
                assert job.stdout.readline() == b"ready\n"
                yield Live(daemon, store)
        finally:
            daemon.terminate()


def test_live_counters_and_a_watch_that_outlives_the_daemon(
    capd: Capd, live: Live, wait_until: WaitUntil
) -> None:
    found = capd("stats", "--json").json
    assert (found["source"], found["run_id"]) == ("daemon", "live")
    assert (found["offered"], found["committed"], found["in_flight"]) == (6, 5, 0)
    assert found["dropped"] == {"unsupported": 1}
    assert found["sessions"][0]["state"] == "live"
    assert found["disk_free"] > 0
    assert capd("stats", live.store, "--json").json["source"] == "daemon"
    assert capd("stats", live.store / "live.zarr", "--json").json["source"] == "daemon"
    assert capd("stats", "--run", "other", "--json").code == 1

    watch = [sys.executable, "-m", "capd", "stats", "--watch", "--interval", "0.1"]
    with forking.popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "offered=6 committed=5 in_flight=0 dropped=1" in process.stdout.readline()
        assert process.stderr.readline().startswith("capd: run live (live; ")
        live.daemon.terminate()
        assert any("daemon gone" in line for line in islice(process.stdout, 200))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in rest + errors


def test_on_a_terminal_the_watch_is_drawn_in_its_place_and_ends_with_ctrl_c(second: Path) -> None:
    with Terminal("stats", second, "--watch", "--interval", "0.1") as terminal:
        terminal.until(lambda _: terminal.text.count("committed") > 3)
        terminal.process.send_signal(signal.SIGINT)
        terminal.read_all()
        assert terminal.process.wait(20) == 130
    lines = terminal.screen.lines

    assert [line.split()[0] for line in lines if line].count("run") == 1
    assert sum("from the store; no daemon writes it" in line for line in lines) == 1
    assert lines[0].startswith("1 capture was dropped: 1 arena_full")
    assert "Traceback" not in terminal.text
    assert (terminal.screen.scrolled, terminal.screen.row, terminal.screen.wraps) == (0, len(lines), True)


def test_the_watch_follows_the_run_to_its_end_and_fits_a_resized_terminal(live: Live) -> None:
    with Terminal("stats", "--watch", "--interval", "0.1", rows=30) as terminal:
        terminal.until(lambda lines: any("live (live;" in line for line in lines))
        live.daemon.terminate()
        # The picture arrives in pieces.
        terminal.until(
            lambda lines: (
                "daemon gone; the last counters known:" in lines
                and sum(line.startswith("offered") for line in lines) == 1
            )
        )
        scrolled = terminal.screen.scrolled

        terminal.resize(40, 12)
        lines = terminal.until(
            lambda lines: bool(lines) and lines[0] == "daemon gone; the last counters known:"
        )
        assert len(lines) <= 11
        assert terminal.screen.scrolled == scrolled


def test_a_watch_from_before_the_job_goes_over_to_its_run(
    store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    monkeypatch.setenv("CAPD_STORE", str(store_root))
    monkeypatch.setattr(counters, "ask_daemon", lambda: SimpleNamespace(runs=runs))
    monkeypatch.setattr(counters, "_live", lambda _, run: stored.model_copy(update=vars(run)))
    stored = counters.read_store(store_root / "first.zarr")
    source = counters.Source(None, None)
    refreshes = stats_watch._refreshes(source, 0.001)

    assert next(refreshes)[0].run_id == "second"
    assert source.instead.startswith(NO_RANK)
    path = str(store_root / "live.zarr")
    live = [SimpleNamespace(state="live")]
    runs.append(SimpleNamespace(run_id="live", path=path, source="daemon", sessions=live))
    assert next(refreshes)[0].run_id == "live"
    runs.append(SimpleNamespace(run_id="later", path=path, source="daemon", sessions=live))
    assert (next(refreshes)[0].run_id, source.instead) == ("live", "")


def test_a_run_whose_ranks_have_left_is_not_called_live(capd: Capd, second: Path) -> None:
    stored = Counters(**capd("stats", second, "--json").json)
    held = stored.model_copy(update={"source": "daemon"})

    assert which_run(held) == f"second (its ranks have left; {second})"
    held.sessions[0].state = "live"
    assert which_run(held) == f"second (live; {second})"


def drop(key: Key, reason: str, count: int, first: int, last: int) -> LedgerRow:
    return LedgerRow(key, "bfloat16", reason, count, 1024 * count, first, last)


def test_drops_are_listed_by_key_and_reason_and_add_up_to_the_counters(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.open("run")
    one, other = linear_key(), linear_key(rank=1, layer=None, module="lm_head")
    first = [drop(one, "arena_full", 3, 5, 9), drop(other, "disk_full", 1, 7, 7)]
    second = [drop(one, "arena_full", 2, 2, 6)]
    counted = {"arena_full": 3, "disk_full": 1, "rank_died": 4}
    writer.save_session("run", session_row(offered=8, committed=0, dropped=counted, drops=first))
    again = session_row(
        client=b"f" * 16, attempt=1, offered=2, committed=0, dropped={"arena_full": 2}, drops=second
    )
    writer.save_session("run", again)
    writer.close()

    found = capd("stats", tmp_path / "run.zarr", "--drops", "--json").json
    lines = capd("stats", tmp_path / "run.zarr", "--drops").out.splitlines()

    told = (
        "reason",
        "count",
        "bytes",
        "first_iteration",
        "last_iteration",
        "rank",
        "layer",
        "module",
        "dtype",
    )
    assert [tuple(row[name] for name in told) for row in found] == [
        ("arena_full", 5, 5120, 2, 9, 0, 0, "blocks.0.mlp.fc1", "bfloat16"),
        ("rank_died", 4, 0, None, None, None, None, "", ""),
        ("disk_full", 1, 1024, 7, 7, 1, None, "lm_head", "bfloat16"),
    ]
    assert sum(row["count"] for row in found) == sum(
        capd("stats", tmp_path / "run.zarr", "--json").json["dropped"].values()
    )
    assert [line.split()[:2] for line in lines[1:]] == [
        ["arena_full", "5"],
        ["rank_died", "4"],
        ["disk_full", "1"],
    ]
    assert "2-9" in lines[1]
    assert "blocks.0.mlp.fc1.input" in lines[1]


def test_without_drops_the_list_says_so_and_watching_it_is_refused(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.open("run")
    writer.close()

    assert capd("stats", tmp_path / "run.zarr", "--drops").out == "nothing was dropped\n"
    assert capd("stats", tmp_path / "run.zarr", "--drops", "--json").json == []
    refused = capd("stats", tmp_path / "run.zarr", "--drops", "--watch")
    assert (refused.code, "give one of --watch and --drops" in refused.err) == (2, True)


def test_drops_of_a_live_job_are_known_within_seconds(capd: Capd, live: Live, wait_until: WaitUntil) -> None:
    def told() -> bool:
        found = capd("stats", "--drops", "--json").json
        return [(row["reason"], row["tensor_name"], row["count"]) for row in found] == [
            ("unsupported", "c", 1)
        ]

    wait_until(told, what="the drop in the ledger")
