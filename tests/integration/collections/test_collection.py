"""`capd run --mode single|batch|quick` around a real model: jobs that end by themselves, crash, hang and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import capd as capd_package
from capd_client.config.recipe import Recipe
from tests.fault.kit.file_systems import mounted_tmpfs
from tests.integration.collections.collect_job import LAYERS, MICRO_BATCHES
from tests.kit import forking
from tests.kit.jobs.collecting import JOB, arguments, jobs, state_of
from tests.kit.jobs.products import assert_products_hold
from tests.kit.processes import Daemon, pause, until

TYPES = ("bf16", "mxfp8", "mxfp4")
BATCH = ("--mode", "batch", "--quant-type", ",".join(TYPES))
LINEARS, ATTENTIONS = 4 * LAYERS + 1, LAYERS
OF_A_MICRO_BATCH = LINEARS * 5 + ATTENTIONS * 5  # all but the weights, which are kept once per iteration
Moments = set[tuple[int, int]]

pytestmark = pytest.mark.timeout(240)


def capd(*command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return forking.run(
        command, capture_output=True, text=True, timeout=200, cwd=cwd, inner=forking.TRAINING,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip


def moments_of(run: Path) -> dict[str, Moments]:
    """By type, the micro-batches that readers see."""
    found: dict[str, Moments] = {}
    for series in capd_package.open(run).find():
        at = found.setdefault(series.key.quant_type, set())
        at |= {(record.iteration, record.micro_batch) for record in series.records}
    return found


def test_a_batch_of_three_types_ends_by_itself_with_exactly_the_micro_batches_asked_for(
    tmp_path: Path,
) -> None:
    options = (*BATCH, "--run-id", "r", "--control-iter", "3", "--collect-micro-batches", "2", "--json")
    done = capd(*arguments(*options, job=(*JOB, "--checkpoint", "{run_dir}/step")), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    run, place = tmp_path / "store" / "r.zarr", tmp_path / "store" / "r.collection"
    assert_products_hold(run)
    assert moments_of(run) == {key: {(0, 0), (0, 1), (1, 0)} for key in TYPES}
    store = capd_package.open(run)
    records = 3 * OF_A_MICRO_BATCH + 2 * LINEARS
    assert {
        name: sum(len(series) for series in store.find(quant_type=name)) for name in TYPES
    } == dict.fromkeys(TYPES, records)
    assert {one["outcome"] for one in state_of(run).values()} == {"complete"}
    recipes = {name: Recipe.of(name).text() for name in TYPES}
    assert {name: one["emulation"] for name, one in state_of(run).items()} == recipes
    assert recipes["bf16"] == "none" != recipes["mxfp4"]
    assert {(series.key.quant_type, series.attributes["emulation"]) for series in store.series} == set(
        recipes.items()
    )
    backward_post = {
        (series.key.tensor_name, series.key.operation, series.key.phase)
        for series in store.series
        if series.key.phase == "post" and series.key.operation == "backward"
    }
    assert backward_post == {("grad_input", "backward", "post"), ("grad_weight", "backward", "post")}
    assert "CMD is the same for all types" not in done.stderr
    for name in TYPES:  # each trained in its own directory, from its own step 0
        assert int((place / "runs" / name / "step").read_text()) >= 2
        assert f"type {name} from step 0" in (place / "logs" / f"{name}.log").read_text()
    assert_report(json.loads(done.stdout), run)
    assert json.loads((place / "report.json").read_text()) == json.loads(done.stdout)
    assert "a label" in (place / "report.txt").read_text()
    assert {path.stat().st_mode & 0o077 for path in [place, *place.rglob("*")] if path.stem != "step"} == {0}

    again = capd(*arguments(*options, job=("./gone",)), cwd=tmp_path)
    assert (again.returncode, again.stdout) == (127, "")


def assert_report(report: dict[str, Any], run: Path) -> None:
    """Against the records themselves, one by one."""
    store = capd_package.open(run)
    assert report["records"] == sum(len(series) for series in store.series)
    assert report["raw_bytes"] == sum(series.raw_bytes for series in store.series)
    assert report["stored_bytes"] == sum(series.stored_bytes for series in store.series)
    assert report["dropped"] == []
    for name, groups in report["by"].items():
        counts: Counter[Any] = Counter()
        nbytes: Counter[Any] = Counter()
        elements: Counter[Any] = Counter()
        largest: dict[Any, float] = {}
        smallest: dict[Any, float] = {}
        sums: Counter[Any] = Counter()
        for series in store.series:
            for record in series.records:
                of_moment = name in ("sample_idx", "iteration")
                value = getattr(record if of_moment else series.key, name)
                counts[value] += 1
                nbytes[value] += record.stats.count * 4
                elements[value] += record.stats.count
                largest[value] = max(largest.get(value, 0.0), record.stats.absmax or 0.0)
                smallest[value] = min(smallest.get(value, 0.0), record.stats.min or 0.0)
                sums[value] += (record.stats.mean or 0.0) * record.stats.count
        assert {one["value"]: one["records"] for one in groups} == counts, name
        assert {one["value"]: one["raw_bytes"] for one in groups} == nbytes, name
        assert {one["value"]: one["count"] for one in groups} == elements, name
        assert {one["value"]: one["absmax"] for one in groups} == largest, name
        assert {one["value"]: one["min"] for one in groups} == smallest, name
        for one in groups:
            assert one["mean"] == pytest.approx(sums[one["value"]] / elements[one["value"]], abs=1e-9), name
            assert one["nan"] == one["inf"] == 0
            assert 0 < one["std"] < one["absmax"]
            assert one["max"] <= one["absmax"]


@pytest.mark.fault
def test_a_type_that_crashes_hangs_or_is_killed_is_reported_and_a_second_start_continues(
    tmp_path: Path,
) -> None:
    options = (*BATCH[:-1], "bf16,mxfp8,mxfp4,hifp8", "--run-id", "r", "--control-iter", "3")
    wrong = (*JOB, "--crash", "bf16", "--hang", "mxfp8", "--kill", "mxfp4", "--checkpoint", "{run_dir}/step")
    done = capd(*arguments(*options, "--timeout", "12s", job=wrong), cwd=tmp_path)

    assert done.returncode == 1
    run = tmp_path / "store" / "r.zarr"
    states = state_of(run)
    assert {name: (one["outcome"], one["exit_code"]) for name, one in states.items()} == {
        "bf16": ("failed", 1), "mxfp8": ("timeout", None), "mxfp4": ("failed", 137), "hifp8": ("complete", None),
    }  # fmt: skip
    assert "mxfp8: timeout, not complete after 12 s (--timeout)" in done.stderr
    assert "capd:   RuntimeError: no kernel for bf16" in done.stderr
    assert "not collected: bf16, mxfp8, mxfp4; the same command with --run-id r retries them" in done.stderr
    assert moments_of(run)["hifp8"] == {(0, 0), (1, 0), (2, 0)}
    assert f"hifp8  complete  {3:>13}" in done.stdout

    again = capd(*arguments(*options, job=(*JOB, "--checkpoint", "{run_dir}/step")), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    states = state_of(run)
    assert {name: (one["outcome"], one["tries"]) for name, one in states.items()} == {
        "bf16": ("complete", 2), "mxfp8": ("complete", 2), "mxfp4": ("complete", 2), "hifp8": ("complete", 1),
    }  # fmt: skip
    assert "hifp8 is collected already" in again.stderr
    assert moments_of(run) == {key: {(0, 0), (1, 0), (2, 0)} for key in states}
    store = capd_package.open(run)
    for name in states:  # of each moment one record: that of the second try, where there was one
        found = [
            (s.path, r.iteration, r.micro_batch, r.call)
            for s in store.find(quant_type=name)
            for r in s.records
        ]
        assert len(found) == len(set(found)) == 3 * (OF_A_MICRO_BATCH + LINEARS)


@pytest.mark.fault
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_collection_that_was_ended_itself_is_continued_by_the_same_command(
    signum: signal.Signals, tmp_path: Path
) -> None:
    command = arguments(*BATCH[:-1], "bf16,mxfp8", "--control-iter", "3", job=(*JOB, "--hang", "mxfp8"))
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        until(
            lambda: any(
                "hanging" in log.read_text() for log in tmp_path.glob("store/*.collection/logs/mxfp8.log")
            ),
            100,
        )
        process.send_signal(signum)
        assert process.wait(150) == (-signal.SIGKILL if signum == signal.SIGKILL else 130)
    left_behind = jobs(tmp_path)
    assert bool(left_behind) == (signum == signal.SIGKILL)  # it could end nothing any more
    for pid in left_behind:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not jobs(tmp_path, "serve"), 60)

    # Not forked: a forked job's command would be another one, which continues nothing.
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ALL_WELL": "1"},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "store").glob("*.zarr")
    assert f"continuing {run.stem}, which was not finished" in done.stderr
    assert "bf16 is collected already" in done.stderr
    assert moments_of(run) == {key: {(0, 0), (1, 0), (2, 0)} for key in ("bf16", "mxfp8")}
    assert {name: one["tries"] for name, one in state_of(run).items()} == {"bf16": 1, "mxfp8": 2}


@pytest.mark.fault
def test_a_daemon_that_is_killed_costs_its_type_and_no_other(tmp_path: Path) -> None:
    command = arguments(
        *BATCH[:-1], "bf16,mxfp8", "--run-id", "r", "--control-iter", "3", job=(*JOB, "--hang", "bf16")
    )
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until(
            lambda: any(
                "hanging" in log.read_text() for log in tmp_path.glob("store/*.collection/logs/bf16.log")
            ),
            100,
        )
        [daemon] = jobs(tmp_path, "serve")
        os.kill(daemon, signal.SIGKILL)
        _, said = process.communicate(timeout=150)

    run = tmp_path / "store" / "r.zarr"
    assert process.returncode == 1
    assert "bf16: daemon, the daemon ended before the job" in said
    assert "CMD is the same for all types" in said
    assert {name: one["outcome"] for name, one in state_of(run).items()} == {
        "bf16": "daemon",
        "mxfp8": "complete",
    }
    assert moments_of(run)["mxfp8"] == {(0, 0), (1, 0), (2, 0)}
    assert jobs(tmp_path) == jobs(tmp_path, "serve") == []


@pytest.mark.fault
def test_all_micro_batches_until_no_more_come(tmp_path: Path) -> None:
    options = (
        "--mode",
        "single",
        "--quant-type",
        "own word",
        "--control-iter",
        "0",
        "--collect-micro-batches",
        "9",
    )
    refused = capd(*arguments(*options), cwd=tmp_path)
    until_stable = ("--until", "stable", "--stable-for", "1.5s", "--run-id", "r")
    done = capd(*arguments(*options, "--yes", *until_stable, job=(*JOB, "--hang", "own word")), cwd=tmp_path)

    assert refused.returncode == 2
    assert "CAPD_MAX_DISK" in refused.stderr
    assert "--yes" in refused.stderr
    assert done.returncode == 0, done.stderr
    run = tmp_path / "store" / "r.zarr"
    assert state_of(run)["own word"]["outcome"] == "stable"
    assert moments_of(run) == {"own word": {(i, m) for i in range(2) for m in range(MICRO_BATCHES)}}


@pytest.mark.parametrize(
    ("how", "environ", "emulation"),
    [
        ("--explicit", {}, Recipe.of("mxfp8").text()),
        pytest.param("--calls", {"CAPD_REPLACE_TENSOR_SAVER": "1"}, "none", marks=pytest.mark.fault),
    ],
)
def test_captures_of_the_scripts_own_count_and_are_left_out_beyond_what_is_asked_for(
    tmp_path: Path, how: str, environ: dict[str, str], emulation: str
) -> None:
    options = ("--mode", "single", "--control-iter", "3", "--run-id", "r")
    done = capd(*arguments(*options, job=(*JOB, how)), cwd=tmp_path, **environ)

    assert done.returncode == 0, done.stderr
    [series] = capd_package.open(tmp_path / "store" / "r.zarr").series
    assert (series.key.tensor_name, series.key.quant_type) == ("loss", "mxfp8")
    assert [(record.iteration, record.call) for record in series.records] == [
        (iteration, call) for iteration in range(3) for call in range(MICRO_BATCHES)
    ]
    assert series.attributes["emulation"] == emulation


def test_a_job_that_trains_too_short_is_incomplete(tmp_path: Path) -> None:
    options = ("--mode", "single", "--control-iter", "5", "--run-id", "r")
    done = capd(*arguments(*options, job=(*JOB, "--steps", "2")), cwd=tmp_path)

    assert done.returncode == 1
    assert "mxfp8: incomplete, the job ended with 2 of 5 micro-batches" in done.stderr


def test_both_ranks_of_torchrun_are_complete_before_they_are_ended(tmp_path: Path, runtime_dir: Path) -> None:
    """Into a daemon that is there already, which goes on."""
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    try:
        torchrun = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            JOB[1],
        )
        command = arguments("--mode", "quick", "--quant-type", "hifp8", "--run-id", "r", job=torchrun)
        done = capd(*command, cwd=tmp_path, CAPD_ENDPOINT=daemon.endpoint)

        assert done.returncode == 0, done.stderr
        found = {
            (series.key.rank, record.iteration, record.micro_batch)
            for series in capd_package.open(tmp_path / "store" / "r.zarr").series
            for record in series.records
        }
        assert found == {(0, 0, 0), (1, 0, 0)}
        assert jobs(tmp_path) == []
        daemon.stop()
    finally:
        daemon.discard()


@pytest.mark.fault
def test_a_rank_that_is_done_before_the_daemon_knows_it_loses_nothing(tmp_path: Path) -> None:
    """The daemon is stopped while the job connects and trains; it is not ended before its captures are stored."""
    daemon = "daemon=$(pgrep -P $PPID -f 'ca[p]d serve')"
    stopped = f"{daemon}; kill -STOP $daemon; (sleep 6; kill -CONT $daemon) & exec {' '.join(JOB)}"
    options = ("--mode", "quick", "--run-id", "r")
    done = capd(*arguments(*options, job=("bash", "-c", stopped)), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "mxfp8: complete, 1 micro-batch of each rank\n" in done.stderr
    store = capd_package.open(tmp_path / "store" / "r.zarr")
    assert sum(len(series) for series in store.series) == OF_A_MICRO_BATCH + LINEARS


def ranks_job(kind: str) -> tuple[str, ...]:
    script = Path(__file__).with_name("collect_ranks_job.py")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return (*launcher, str(script), kind)


@pytest.mark.fault
def test_ranks_that_accumulate_and_evaluate_keep_the_same_micro_batches_and_no_evaluation(
    tmp_path: Path,
) -> None:
    options = ("--mode", "single", "--control-iter", "3", "--collect-micro-batches", "2", "--run-id", "r")
    done = capd(*arguments(*options, job=ranks_job("ddp")), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    store = capd_package.open(tmp_path / "store" / "r.zarr")
    for rank in (0, 1):
        for series in store.find(rank=rank):
            kept = [(record.iteration, record.micro_batch) for record in series.records]
            name = series.key.tensor_name
            # A parameter is the same for all micro-batches of an iteration.
            assert kept == ([(0, 0), (1, 0)] if name == "weight" else [(0, 0), (0, 1), (1, 0)]), series.path
        found = {series.key.tensor_name for series in store.find(rank=rank)}
        assert found >= {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
    assert len(store.find(rank=0)) == len(store.find(rank=1)) > 0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "environ"),
    [
        ("embedding", {}),
        ("calls", {"CAPD_REPLACE_TENSOR_SAVER": "1"}),
    ],
)
def test_a_rank_that_captures_nothing_does_not_keep_the_others_from_being_complete(
    kind: str, environ: dict[str, str], tmp_path: Path
) -> None:
    options = ("--mode", "single", "--control-iter", "3", "--stable-for", "4s", "--run-id", "r")
    done = capd(*arguments(*options, job=ranks_job(kind)), cwd=tmp_path, **environ)

    assert done.returncode == 0, done.stderr
    said = (
        "mxfp8: complete, 3 micro-batches of 1 of 2 ranks (the rest captures nothing), no new record for 4 s"
    )
    assert said in done.stderr
    assert {series.key.rank for series in capd_package.open(tmp_path / "store" / "r.zarr").series} == {0}


@pytest.mark.fault
def test_a_byte_budget_that_is_used_up_ends_each_type_by_its_name(tmp_path: Path) -> None:
    options = (*BATCH[:-1], "bf16,mxfp8", "--run-id", "r", "--control-iter", "100000")
    job = ("bash", "-c", f"echo $WHICH; exec {' '.join(JOB)}")
    own = ("--env", "WHICH=type {quant_type}, number {index}")
    done = capd(*arguments(*options, *own, job=job), cwd=tmp_path, CAPD_MAX_DISK="200KB")

    assert done.returncode == 6
    assert "CMD is the same for all types" not in done.stderr
    run = tmp_path / "store" / "r.zarr"
    place = run.with_suffix(".collection")
    assert (place / "report.txt").read_text() == done.stdout
    report = json.loads((place / "report.json").read_text())
    assert {one["quant_type"] for one in report["dropped"] if one["reason"] == "disk_full"} >= {
        "bf16",
        "mxfp8",
    }
    for number, name in enumerate(("bf16", "mxfp8")):
        assert (place / "logs" / f"{name}.log").read_text().startswith(f"type {name}, number {number}\n")
    for name, one in state_of(run).items():
        assert (one["outcome"], one["exit_code"]) == ("full", None)
        assert f"{name}: full, the space is used up: max_disk refuses a record of" in done.stderr
        assert one["records"] == sum(len(s) for s in capd_package.open(run).find(quant_type=name)) > 0
        trained = (run.with_suffix(".collection") / "logs" / f"{name}.log").read_text()
        assert "Traceback" not in trained
    assert jobs(tmp_path) == jobs(tmp_path, "serve") == []


@pytest.mark.fault
def test_a_disk_that_is_full_to_its_last_byte_ends_types_and_not_the_collection(tmp_path: Path) -> None:
    options = (*BATCH[:-1], "bf16,mxfp8", "--run-id", "r", "--control-iter", "100000", "--timeout", "20s")
    with mounted_tmpfs(tmp_path / "disk", "size=3m") as disk:
        done = capd(*arguments(*options), cwd=disk, CAPD_KEEP_FREE="0")

        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "bf16: full, the space is used up" in done.stderr
        assert "collecting mxfp8, 2 of 2" in done.stderr
        assert "not collected: bf16, mxfp8" in done.stderr
        assert "\ntensor_name " in done.stdout  # the report is printed to its end
        assert jobs(disk) == jobs(disk, "serve") == []


@pytest.mark.fault
def test_a_daemon_that_is_stopped_costs_its_type_and_no_other(tmp_path: Path) -> None:
    """What it had is sealed all the same: it is woken once the job is over."""
    command = arguments(
        *BATCH[:-1], "bf16,mxfp8", "--run-id", "r", "--control-iter", "3", "--timeout", "25s",
        job=(*JOB, "--hang", "bf16", "--checkpoint", "{run_dir}/step"),
    )  # fmt: skip
    log = tmp_path / "store" / "r.collection" / "logs" / "bf16.log"
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: log.exists() and "hanging" in log.read_text(), 100)
        [daemon] = jobs(tmp_path, "serve")
        pause(daemon)
        _, said = process.communicate(timeout=200)

    run = tmp_path / "store" / "r.zarr"
    assert process.returncode == 1, said
    assert "does not stop" not in said
    assert {name: one["outcome"] for name, one in state_of(run).items()} == {
        "bf16": "timeout",
        "mxfp8": "complete",
    }
    assert moments_of(run)["bf16"] >= {(0, 0)}
    assert moments_of(run)["mxfp8"] == {(0, 0), (1, 0), (2, 0)}
    assert jobs(tmp_path) == jobs(tmp_path, "serve") == []


def test_what_a_job_lacks_is_found_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("echo started\n")
    (tmp_path / "data.bin").touch()
    (tmp_path / "data.idx").touch()
    missing = capd(*arguments("--mode", "batch", job=("./train_{quant_type}.sh",)), cwd=tmp_path)
    plain = capd(*arguments("--mode", "quick", job=("./train.sh",)), cwd=tmp_path)
    data = capd(
        *arguments("--mode", "quick", "--require", "data", "--require", "words/{quant_type}"), cwd=tmp_path
    )

    assert (missing.returncode, plain.returncode, data.returncode) == (127, 126, 2)
    assert "./train_bf16.sh: command not found; nothing was started" in missing.stderr
    assert "chmod +x" in plain.stderr
    assert "--require: words/mxfp8 does not exist" in data.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx", "train.sh"]


@pytest.mark.slow
def test_a_type_whose_command_turns_out_to_be_none_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "train_bf16.sh").write_text("#!/no/such/interpreter\n")
    (tmp_path / "train_mxfp8.sh").write_text(f"#!/bin/sh\nexec {' '.join(JOB)}\n")
    for script in tmp_path.glob("*.sh"):
        script.chmod(0o755)
    options = (*BATCH[:-1], "bf16,mxfp8", "--run-id", "r")
    done = capd(*arguments(*options, job=("./train_{quant_type}.sh",)), cwd=tmp_path)

    assert done.returncode == 1
    assert "bf16: failed, ./train_bf16.sh cannot be executed: No such file or directory" in done.stderr
    states = state_of(tmp_path / "store" / "r.zarr")
    assert {name: (one["outcome"], one["exit_code"]) for name, one in states.items()} == {
        "bf16": ("failed", 126),
        "mxfp8": ("complete", None),
    }


def test_jobs_that_capture_nothing_are_told_why_and_warned_about_their_places(tmp_path: Path) -> None:
    done = capd(*arguments(*BATCH[:-1], "bf16,mxfp8", job=("true",)), cwd=tmp_path)

    assert done.returncode == 5
    assert "CMD is the same for all types" in done.stderr
    assert "mxfp8: nothing, the job ended by itself, and nothing was captured" in done.stderr
    assert "no Python of the job read capd's start-up file" in done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["bf16", "nothing"]


@pytest.mark.slow
def test_tensor_savers_command_line(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        'set -eu; mkdir -p "$1" "$2"; printf "%s\\n" "$*" "$HOST_TENSORBOARD_LOGS_PATH" > "$2/arguments"\n'
        f'exec {JOB[0]} {JOB[1]} --checkpoint "$1/step"\n'
    )
    for suffix in (".bin", ".idx"):
        (tmp_path / f"words{suffix}").touch()
    wrapper = Path(__file__).parents[3] / "examples" / "megatron" / "run_tensor_collection.sh"
    line = (
        "single",
        "hifp8",
        "--control-micro-batches",
        "3",
        "--collect-micro-batches",
        "2",
        "--dtype",
        "fp8",
    )
    places = ("--tensor-path", "logs", "--tokenizer-path", "tok", "--data-path")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {"TRAIN_SCRIPT": "train.sh", "PATH": path}

    lacking = capd("bash", str(wrapper), *line, *places, "gone", cwd=tmp_path, **environ)
    done = capd("bash", str(wrapper), *line, *places, "words", cwd=tmp_path, **environ)

    assert lacking.returncode == 2
    assert "--require: gone does not exist" in lacking.stderr
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "logs").glob("*.zarr")
    assert moments_of(run) == {"hifp8": {(0, 0), (0, 1), (1, 0)}}
    own = run.with_suffix(".collection") / "runs" / "hifp8"
    told = (own / "tensorboard" / "arguments").read_text().splitlines()
    assert told == [f"{own}/checkpoints {own}/tensorboard tok words fp8", f"{own}/tensorboard"]
