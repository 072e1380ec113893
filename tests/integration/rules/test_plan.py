"""`capd plan`: what it says of a job is what `capd run` then captures, and nothing is captured for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import capd as capd_package
from tests.kit import forking
from tests.kit.processes import until

JOB = Path(__file__).with_name("plan_job.py")
STEPS = 3


def capd(
    *args: str | Path, cwd: Path, inner: str = forking.TRAINING, **environ: str
) -> subprocess.CompletedProcess[str]:
    return forking.run(
        [sys.executable, "-m", "capd", *map(str, args)],
        capture_output=True, text=True, timeout=110, cwd=cwd, env={**os.environ, **environ}, inner=inner,
    )  # fmt: skip


def planned(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


NAMES = (
    "quant_type",
    "rank",
    "layer",
    "phase",
    "layer_type",
    "operation",
    "component",
    "tensor_name",
    "module",
    "stack",
)
Counts = Counter[tuple[Any, ...]]


def counts_of_plan(plan: dict[str, Any]) -> Counts:
    """Records by series and iteration."""
    found: Counts = Counter()
    for rank in plan["ranks"]:
        for series in rank["series"]:
            for iteration, records in series["iterations"].items():
                found[
                    (*(series[name] for name in NAMES), series["dtype"], series["kept"], int(iteration))
                ] += records
    return +found


def counts_of_run(
    run: Path,
) -> tuple[Counts, Counter[tuple[int, int]], dict[tuple[Any, ...], set[tuple[int, ...]]]]:
    """The same of a store, its bytes by rank and iteration, and the shapes of each series."""
    counts: Counts = Counter()
    nbytes: Counter[tuple[int, int]] = Counter()
    shapes: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    for series in capd_package.open(run).series:
        names = tuple(getattr(series.key, name) for name in NAMES)
        for record in series.records:
            counts[(*names, series.dtype, series.kept, record.iteration)] += 1
            nbytes[series.key.rank, record.iteration] += (
                series.raw_bytes // len(series.records)
                if series.kept == "statistics"
                else record.stats.count * {"float32": 4, "int32": 4}[series.dtype]
            )
            shapes.setdefault((*names, series.dtype), set()).add(tuple(record.shape))
    return counts, nbytes, shapes


def assert_same(plan: dict[str, Any], run: Path) -> None:
    counts, nbytes, shapes = counts_of_run(run)
    assert counts_of_plan(plan) == counts
    assert {
        (rank["rank"], i["iteration"]): i["bytes"]
        for rank in plan["ranks"]
        for i in rank["iterations"]
        if i["bytes"]
    } == nbytes
    assert {
        (*(series[name] for name in NAMES), series["dtype"]): {tuple(shape) for shape in series["shapes"]}
        for rank in plan["ranks"]
        for series in rank["series"]
        if sum(series["iterations"].values())
    } == shapes


@pytest.mark.fault
@pytest.mark.timeout(300)  # two jobs of two ranks each
def test_a_plan_of_two_ranks_is_what_is_then_captured(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    store = tmp_path / "store"

    # The planned job would train for a long time; it is ended.
    done = capd(
        "plan", "--store", store, "--json", "--", *torchrun, JOB, "100000", cwd=tmp_path, CAPD_STEPS="1-2"
    )
    plan = planned(done)
    assert list(tmp_path.iterdir()) == []
    command = ["run", "--store", store, "--run-id", "r", "--", *torchrun, JOB, str(STEPS)]
    run = capd(*command, cwd=tmp_path, CAPD_STEPS="0-2")

    assert run.returncode == 0, run.stderr
    assert_same(plan, store / "r.zarr")
    assert plan["world_size"] == 2
    assert [rank["steps"] for rank in plan["ranks"]] == [["1-2"]] * 2
    assert all(rank["complete"] and len(rank["iterations"]) == STEPS for rank in plan["ranks"])
    assert [node["ranks"] for node in plan["nodes"]] == [[0, 1]]
    assert all(rank["refused"] == {"unsupported": 2} for rank in plan["ranks"])
    assert len([line for line in plan["warnings"] if "unsupported" in line]) == 2


ZERO_LINE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(5, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("mode", "script"),
    [
        ("stats", ["-c", ZERO_LINE]),
        pytest.param("sample:1/2", [JOB, str(STEPS)], marks=pytest.mark.fault),  # half a minute
    ],
)
def test_a_plan_counts_what_the_mode_keeps_also_without_a_line_in_the_job(
    tmp_path: Path, mode: str, script: list[str | Path]
) -> None:
    store = tmp_path / "store"
    job = ["--", sys.executable, *script]  # ends by itself

    plan = planned(capd("plan", "--mode", mode, "--json", *job, cwd=tmp_path))
    flags = ["--mode", mode, "--steps", "all", "--store", store, "--run-id", "r"]
    run = capd("run", *flags, *job, cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert plan["ranks"][0]["records"] > 0
    assert_same(plan, store / "r.zarr")


UNSTEPPED = """
import sys
import torch
import capd_client
model = torch.nn.Linear(8, 4)
capd_client.watch(model)
for _ in range(int(sys.argv[1])):
    model(torch.ones(5, 8)).sum().backward()
    model.zero_grad()
"""


@pytest.mark.fault
def test_of_a_loop_without_an_optimizer_as_many_forwards_are_planned_as_are_captured(tmp_path: Path) -> None:
    store = tmp_path / "store"
    job = [sys.executable, "-c", UNSTEPPED]

    plan = planned(capd("plan", "--timeout", "60", "--json", "--", *job, str(10**9), cwd=tmp_path))
    run = capd("run", "--store", store, "--run-id", "r", "--", *job, "300", cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert_same(plan, store / "r.zarr")
    [warning] = plan["warnings"]
    assert "256 forwards and no step of a torch.optim.Optimizer" in warning
    assert warning in run.stderr


def test_the_table_groups_layers_and_names_limits_and_speeds(tmp_path: Path) -> None:
    done = capd(
        "plan", "--iterations", "1", "--", sys.executable, JOB, "1000", cwd=tmp_path, CAPD_MAX_DISK="1KB"
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "one captured step of rank 0:"
    assert [line.split()[:3] for line in lines if line.startswith("layers.*.0") and " input " in line] == [
        ["layers.*.0", "input", "2"]
    ]
    assert "in 1,000 steps" in done.stdout
    assert re.search(
        r"^  containers add .* to the memory limit of the ranks, and .* to the daemon.s$", done.stdout, re.M
    )
    assert "CAPD_MAX_DISK" in done.stdout.splitlines()[-1]


def test_a_quota_smaller_than_the_selection_is_named(tmp_path: Path) -> None:
    (tmp_path / "capd.toml").write_text('[quota]\nrun_max = "1KB"\n')
    command = ("plan", "--iterations", "1", "--", sys.executable, JOB, "1000")
    done = capd(*command, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "run_max 1000 B" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert "the rest is kept as statistics or dropped (quota)" in last
    assert last.endswith("Change CAPD_RUN_MAX")
    assert "CAPD_RUN_MAX" not in capd(*command, cwd=tmp_path, CAPD_RUN_MAX="1TB").stdout


def test_a_job_that_asks_for_nothing_fails_or_hangs_is_told_of_and_nothing_is_left(tmp_path: Path) -> None:
    idle = ["sh", "-c", "echo $$; exec sleep 600"]  # which has said so long before the time is over

    nothing = capd("plan", "--", sys.executable, "-c", "print('hello')", cwd=tmp_path, inner="")
    failed = capd("plan", "--", sys.executable, "-c", "raise SystemExit(9)", cwd=tmp_path, inner="")
    hung = capd("plan", "--timeout", "2", "--", *idle, cwd=tmp_path)
    absent = capd("plan", "--", "no-such-command", cwd=tmp_path)

    assert [nothing.returncode, failed.returncode, hung.returncode, absent.returncode] == [5, 1, 1, 127]
    assert [nothing.stdout, failed.stdout, hung.stdout] == ["", "", ""]
    assert "hello" in nothing.stderr
    assert "no process of the job imported torch" in nothing.stderr
    assert "exit code 9" in failed.stderr
    assert "--timeout" in hung.stderr
    pid = int(hung.stderr.split()[0])
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_ctrl_c_ends_the_job_too(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-m", "capd", "plan", "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    pid = int(process.stderr.readline())
    began = time.monotonic()
    process.send_signal(2)
    _, errors = process.communicate(timeout=60)

    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    until(lambda: not Path(f"/proc/{pid}").exists(), 60 - (time.monotonic() - began))
