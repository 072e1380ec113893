"""The lab of a real daemon beside real jobs: its numbers are those of `capd compare`, and it harms nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zarr

import capd as capd_package
from capd.analyze.error_sums import merged
from capd.analyze.format_choice import choices
from capd.lab.measuring import measured_bits
from capd.store.read.store import Store
from capd_client.protocol.control import Stats, StatsReply
from capd_client.protocol.messages import encode
from tests.integration.lab import lab_job
from tests.kit import forking, processes
from tests.kit.daemon import receive, tool
from tests.kit.live.lab_worker import hurry, worker_of
from tests.kit.metrics.scrape import get
from tests.kit.processes import Daemon, until

FORMATS = "fp8,mxfp8,mxfp4:rceil,nvfp4:16x16,hifp8,mxfp8:axis=-2"
StartDaemon = Callable[..., Daemon]
# The lab takes only CPU time that nobody else wants.
PATIENCE_S = 100.0


@pytest.fixture
def start_daemon(tmp_path: Path, runtime_dir: Path) -> Iterator[StartDaemon]:
    """Starts daemons with a lab on one store; they do not outlive the test."""
    started: list[Daemon] = []

    def start(*options: str, **settings: str) -> Daemon:
        lab = {"CAPD_LAB_FORMATS": FORMATS, "CAPD_LAB_SAMPLE": "1/2", "CAPD_LAB_CPU": "100%", **settings}
        # `exec` by env: the process of the daemon is the one that was started.
        prefix = ("env", *(f"{name}={value}" for name, value in lab.items()))
        started.append(Daemon(tmp_path / "store", runtime_dir, *options, prefix=prefix).start())
        return started[-1]

    yield start
    for daemon in started:
        daemon.discard()


def job(daemon: Daemon, *words: str, run: str = "run", **environment: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    forking.run(
        [sys.executable, lab_job.__file__, *words],
        env={
            **inherited,
            "PYTHONPATH": path,
            "CAPD_STRICT": "1",
            "CAPD_ENDPOINT": daemon.endpoint,
            "CAPD_RUN_ID": run,
            "CAPD_ARENA_BYTES": str(32 << 20),
            **environment,
        },
        check=True,
        timeout=100,
    )


def capd(*words: str | Path) -> str:
    """What a command prints; it must succeed."""
    return processes.capd(*map(str, words)).stdout


def lab(daemon: Daemon) -> dict[str, Any]:
    """The daemon's lab, from STATS."""
    hurry(daemon.process)
    with tool(daemon.socket) as connection:
        connection.send_bytes(encode(Stats(None)))
        reply = receive(connection)
    assert isinstance(reply, StatsReply)
    found: dict[str, Any] = reply.stats["lab"]
    return found


def accounted(daemon: Daemon, number: int) -> dict[str, int]:
    """The outcomes, once so many records have one."""
    until(lambda: sum(lab(daemon)["records"].values()) >= number, PATIENCE_S)
    found: dict[str, int] = lab(daemon)["records"]
    assert sum(found.values()) == number, found
    return {name: count for name, count in found.items() if count}


SOURCES = len(lab_job.tensors(0)) - 1  # the whole numbers have no error
SAMPLED = SOURCES * lab_job.STEPS // 2


def test_the_stored_numbers_are_those_of_compare_to_the_bit(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    job(daemon)
    assert accounted(daemon, SAMPLED) == {"measured": SAMPLED}
    daemon.stop()
    run = daemon.store / "run.zarr"
    chosen, measured = choices(FORMATS), 0
    for series in capd_package.open(run).series:
        for record in series:
            if record.iteration % 2 or series.key.tensor_name == "whole":
                assert record.errors == {}
                continue
            errors, _ = measured_bits(record.numpy(), series.dtype, chosen)
            assert record.errors == errors
            assert list(record.errors) == list(errors)
            measured += 1
    assert measured == SAMPLED

    lines = capd("compare", run, "--lab", "--by", "tensor_name,iteration", "--json")
    stored = json.loads(lines)
    fresh = json.loads(capd("compare", run, "--formats", FORMATS, "--by", "tensor_name,iteration", "--json"))
    of_sample = [one for one in fresh["groups"] if one["iteration"] % 2 == 0]
    assert [(one["tensor_name"], one["iteration"], one["errors"]) for one in stored["groups"]] == [
        (one["tensor_name"], one["iteration"], one["errors"]) for one in of_sample
    ]
    assert stored["lab"] == {
        "samples": ["1/2"],
        "measured": SAMPLED,
        "in_sample": SAMPLED,
        "outside": SAMPLED,
    }


def test_records_that_keep_only_statistics_have_the_same_errors(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(CAPD_LAB_SAMPLE="1/1")
    job(daemon, run="tensors")
    job(daemon, run="statistics", CAPD_MODE="stats")
    accounted(daemon, 2 * SOURCES * lab_job.STEPS)
    daemon.stop()
    kept = [capd_package.open(daemon.store / f"{name}.zarr") for name in ("tensors", "statistics")]
    found = [
        {(one.key.tensor_name, r.iteration): r.errors for one in store.series for r in one if r.errors}
        for store in kept
    ]
    assert len(found[0]) == SOURCES * lab_job.STEPS
    assert found[0] == found[1]
    assert {one.kept for one in kept[1].series} == {"statistics"}


def test_two_ranks_with_one_tensor_name_of_which_one_is_killed_have_errors_of_their_own(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(CAPD_LAB_SAMPLE="1/1", CAPD_LAB_FORMATS="nvfp4:16x16,mxfp8")
    code = (
        "import os, signal, torch, capd_client\n"
        "rank = int(os.environ['RANK'])\n"
        "for step in range(4):\n"
        "    values = torch.full((64, 64), 1.0 + rank) / 3\n"
        "    capd_client.capture(values, tensor_name='x', iteration=step)\n"
        "    assert capd_client.flush(timeout_s=60)\n"
        "    if rank and step == 2:\n"
        "        capd_client.capture(torch.ones(64, 64), tensor_name='x', iteration=3)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "capd_client.close()\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    for rank, ended in ((0, 0), (1, -signal.SIGKILL)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={
                **inherited,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
                ),
                "CAPD_ENDPOINT": daemon.endpoint,
                "CAPD_RUN_ID": "run",
            },
            check=False,
            timeout=100,
        )
        assert done.returncode == ended
    # The daemon takes the last capture of the killed rank out of its arena, if it was complete there.
    until(lambda: lab(daemon)["records"]["measured"] >= 7, PATIENCE_S)
    daemon.stop()
    store, chosen = capd_package.open(daemon.store / "run.zarr"), choices("nvfp4:16x16,mxfp8")
    records = [(series, record) for series in store.series for record in series]
    assert {series.key.rank for series, _ in records} == {0, 1}
    assert len(records) in (7, 8)
    for series, record in records:
        assert record.errors == measured_bits(record.numpy(), series.dtype, chosen)[0], (series.path, record)
    assert store.totals().error_records == len(records)


def test_a_trained_model_is_measured_by_whole_calls(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(CAPD_LAB_SAMPLE="1/4")
    job(daemon, "train", CAPD_STEPS="all")
    until(lambda: lab(daemon)["records"]["measured"] and not lab(daemon)["waiting"], PATIENCE_S)
    daemon.stop()
    names: dict[tuple[str, int], set[str]] = {}
    for series in capd_package.open(daemon.store / "run.zarr").series:
        for record in series:
            assert bool(record.errors) == ((record.iteration + record.micro_batch + record.call) % 4 == 0)
            if record.errors:
                place = (series.key.module, record.iteration)
                names.setdefault(place, set()).add(f"{series.key.operation}.{series.key.tensor_name}")
    assert len(names) == 2 * 2  # two layers, iterations 0 and 4
    assert all({"forward.input", "forward.weight", "backward.grad_output"} & each for each in names.values())
    assert len({frozenset(each) for each in names.values()}) <= 2


# Some twenty commands: 15 s alone, and more than two minutes beside other tests on two busy cores.
@pytest.mark.timeout(360)
def test_readers_show_tensors_alone_and_every_copy_keeps_the_errors(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    job(daemon)
    accounted(daemon, SAMPLED)
    daemon.stop()
    run = daemon.store / "run.zarr"
    store = capd_package.open(run)
    assert len(store.series) == SOURCES + 1
    assert store.totals().records == (SOURCES + 1) * lab_job.STEPS + 1
    assert store.totals().error_records == SAMPLED
    assert len(json.loads(capd("ls", run, "--json"))) == SOURCES + 1
    said = json.loads(capd("stats", run, "--json"))
    assert (said["committed"], said["error_records"]) == (store.totals().records, SAMPLED)
    assert f"errors of {SAMPLED} records measured while capturing" in capd("stats", run)
    assert "sound" in capd("verify", run)
    shown = capd("show", run, "pre/tensor.forward.bf16#0")
    assert "errors      fp8: SQNR 3" in shown
    assert "scale std" in shown
    document = json.loads(capd("show", run, "pre/tensor.forward.bf16#0", "--json"))
    assert list(document["errors"]) == FORMATS.split(",")
    assert capd("report", run, "--out", tmp_path / "report")

    expected = everything(store)
    assert len(expected) == SAMPLED
    for words in (
        ("cp", run, tmp_path / "copy.zarr"),
        ("cp", run, tmp_path / "coded.zarr", "--recode", "zstd:3"),
        ("cp", run, tmp_path / "thin.zarr", "--stats-only"),
    ):
        capd(*words)
        copy = Path(words[2])
        assert everything(capd_package.open(copy)) == expected, words
        assert "sound" in capd("verify", copy)
    address = f"file://{tmp_path}/bucket"
    capd("upload", run, address)
    assert everything(capd_package.open(f"{address}/run.zarr")) == expected
    assert capd("compare", f"{address}/run.zarr", "--lab", "--csv") == capd("compare", run, "--lab", "--csv")
    capd("rm", tmp_path / "copy.zarr", "--series", "*tensor.forward.bf16*", "--yes")
    left = capd_package.open(tmp_path / "copy.zarr")
    assert everything(left) == {at: errors for at, errors in expected.items() if at[0] != "bf16"}
    assert left.totals().committed == store.totals().committed


def test_two_runs_of_one_rank_keep_their_errors_in_a_merged_run(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    for run in ("a", "b"):
        job(daemon, run=run, LAB_STEPS="2")
    accounted(daemon, 2 * SOURCES)
    daemon.stop()
    capd("merge", daemon.store / "a.zarr", daemon.store / "b.zarr", "-o", tmp_path / "both.zarr")
    store = capd_package.open(tmp_path / "both.zarr")
    found = [
        (one.key.tensor_name, record.attempt, record.errors)
        for one in store.find(attempt="all")
        for record in one
        if record.errors
    ]
    assert {attempt for _, attempt, _ in found} == {0, 1}
    assert len(found) == 2 * SOURCES
    # Both runs captured the same tensors.
    of = everything(capd_package.open(daemon.store / "a.zarr"))
    assert all(errors == of[name, 0] for name, _, errors in found)


def test_plain_zarr_readers_see_an_array_of_bytes_beside_the_tensors(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    job(daemon)
    accounted(daemon, SAMPLED)
    daemon.stop()
    groups = [
        json.loads(file.read_text())["attributes"]["capd"]
        for file in (daemon.store / "run.zarr").glob("*/*/*/*/*/zarr.json")
    ]
    kinds = [one["encoding"] for one in groups]
    assert kinds.count("errors") == SOURCES
    place = next(
        file.parent
        for file in (daemon.store / "run.zarr").glob("*/*/*/*/*~v1/zarr.json")
        if json.loads(file.read_text())["attributes"]["capd"]["encoding"] == "errors"
    )
    array = zarr.open_array(place / "data", mode="r")
    assert (str(array.dtype), array.shape[0]) == ("uint8", lab_job.STEPS // 2)
    assert json.loads((place / "zarr.json").read_text())["attributes"]["capd"]["attributes"] == {
        "sample": "1/2",
        "formats": FORMATS.split(","),
    }


def test_a_killed_process_loses_one_record_at_most_and_another_one_measures_on(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon()
    first = until(lambda: worker_of(daemon.process))
    job(daemon)
    accounted(daemon, SAMPLED)
    os.kill(first, signal.SIGKILL)
    job(daemon, run="again")
    found = accounted(daemon, 2 * SAMPLED)
    assert found.get("failed", 0) <= 1
    assert found["measured"] >= 2 * SAMPLED - 1
    assert worker_of(daemon.process) not in (None, first)
    assert "[lab] the process that measures is lost: it ended by signal 9; the next one starts in 1 s" in (
        daemon.output()
    )
    daemon.stop()


def test_a_killed_daemon_keeps_its_rows_and_readers_count_what_is_missing(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(CAPD_LAB_CPU="10%")
    job(daemon, LAB_STEPS="40", CAPD_ARENA_BYTES="256MiB")
    until(lambda: lab(daemon)["records"]["measured"] > 20, PATIENCE_S)
    known = lab(daemon)["records"]["measured"]
    worker = worker_of(daemon.process)
    daemon.kill()
    assert worker is not None
    until(lambda: not Path(f"/proc/{worker}").exists())
    run = daemon.store / "run.zarr"
    assert len(everything(capd_package.open(run))) >= known
    daemon = start_daemon()
    daemon.stop()
    store = capd_package.open(run)
    found = everything(store)
    assert len(found) >= known
    for series in store.series:
        for record in series:
            if record.errors:
                assert record.errors == measured_bits(record.numpy(), series.dtype, choices(FORMATS))[0]
    assert "sound" in capd("verify", run)
    numbers = json.loads(capd("compare", run, "--lab", "--json"))["lab"]
    assert numbers["measured"] == len(found)
    if numbers["measured"] < SOURCES * 20:
        missing = numbers["in_sample"] - numbers["measured"]
        # Series without any row cannot say what their sample was.
        assert 0 <= missing <= SOURCES * 20 - len(found)


def test_a_small_budget_and_little_memory_leave_records_out_and_count_them(
    start_daemon: StartDaemon,
) -> None:
    daemon = start_daemon(CAPD_STAGING_BYTES="1MiB", CAPD_LAB_SAMPLE="1/1", CAPD_LAB_CPU="1%")
    job(daemon, LAB_STEPS="30", CAPD_ARENA_BYTES="256MiB")
    until(lambda: sum(lab(daemon)["records"].values()) + lab(daemon)["waiting"] == SOURCES * 30)
    found = lab(daemon)
    # A copy of "large" is larger than the half of the staging memory.
    assert found["records"]["too_large"] == 30
    assert found["records"]["budget"] + found["records"]["memory"] > SOURCES * 5
    assert found["waiting_bytes"] <= 512 << 10
    daemon.stop()
    store = capd_package.open(daemon.store / "run.zarr")
    assert store.totals().records == (SOURCES + 1) * 30 + 1
    assert not store.totals().dropped


def test_without_a_lab_there_is_no_process_and_with_one_no_torch_in_the_daemon(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon()
    until(lambda: worker_of(daemon.process))
    assert daemon.process is not None
    assert "libtorch" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()
    daemon.stop()
    plain = start_daemon(CAPD_LAB_FORMATS="")
    assert worker_of(plain.process) is None
    assert lab(plain) is None
    plain.stop()


def test_metrics_count_the_outcomes(start_daemon: StartDaemon, runtime_dir: Path) -> None:
    page = runtime_dir / "m.sock"
    daemon = start_daemon("--metrics", f"unix:{page}")
    job(daemon)
    accounted(daemon, SAMPLED)
    # The clock of the daemon takes a snapshot each second.
    line = f'capd_lab_records_total{{outcome="measured"}} {SAMPLED}\n'
    until(lambda: line in get(page).body)
    text = get(page).body
    assert 'capd_lab_records_total{outcome="budget"} 0\n' in text
    assert "capd_lab_cpu_seconds_total " in text


def test_bad_settings_stop_the_start_with_one_line(tmp_path: Path) -> None:
    for name, value, said in (
        ("FORMATS", "mxfp9", "unknown format 'mxfp9'"),
        ("SAMPLE", "0", "'0' is no sample"),
        ("CPU", "200%", "a share of one CPU is from 0.1% to 100%"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "capd", "serve", "--store", str(tmp_path / "store")],
            env={**os.environ, f"CAPD_LAB_{name}": value},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert f"lab_{name.lower()} (env CAPD_LAB_{name})" in done.stderr
        assert said in done.stderr


def everything(store: Store) -> dict[tuple[str, int], Any]:
    """The errors of a run by tensor and iteration, those with any."""
    return {
        (one.key.tensor_name, record.iteration): record.errors
        for one in store.series
        for record in one
        if record.errors
    }


def test_merged_errors_of_a_run_do_not_depend_on_the_order(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    job(daemon)
    accounted(daemon, SAMPLED)
    daemon.stop()
    each = [one["mxfp8"] for one in everything(capd_package.open(daemon.store / "run.zarr")).values()]
    assert merged(each) == merged(reversed(each))
