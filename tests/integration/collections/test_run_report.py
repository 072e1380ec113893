"""`capd run --report DIR`: one command that collects and draws, and never hides how the job ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

import capd as capd_package
from tests.kit import forking
from tests.kit.processes import until

JOB = (sys.executable, str(Path(__file__).with_name("collect_job.py")))
# Few tensors make few panels.
RULES = """
[[rule]]
tensors = ["input", "query"]
"""
NAMES = {
    "global_statistics.json", "global_statistics_report.txt", "quant_types.png", "hifp8.png", "overflow.png",
    "overflow_formats.png", "exponents.png", "channels.png", "value_distribution.png",
}  # fmt: skip

pytestmark = pytest.mark.timeout(240)


def arguments(*options: str, job: tuple[str, ...] = JOB) -> list[str]:
    return [sys.executable, "-m", "capd", "run", "--store", "store", "--run-id", "r", *options, "--", *job]


def environ_of(place: Path) -> dict[str, str]:
    (place / "rules.toml").write_text(RULES)
    return {**os.environ, "OMP_NUM_THREADS": "1", "CAPD_SELECT": str(place / "rules.toml")}


def capd(*command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return forking.run(
        command, capture_output=True, text=True, timeout=200, cwd=cwd, inner=forking.TRAINING,
        env={**environ_of(cwd), **environ},
    )  # fmt: skip


def assert_drawn(place: Path, types: set[str]) -> None:
    """The report in `draw` is of all that the run holds."""
    out = place / "draw"
    names = {path.name for path in out.iterdir()}
    assert names >= NAMES | {f"layer_sample_{one}.png" for one in types} | {
        f"sqnr_{one}.png" for one in types
    }
    for page in out.glob("*.png"):
        assert matplotlib.image.imread(page).size
    document = json.loads((out / "global_statistics.json").read_text())
    by_type = {group["quant_type"]: group["records"] for group in document["by"]["quant_type"]}
    store = capd_package.open(place / "store" / "r.zarr")
    assert by_type == {one: sum(len(series) for series in store.find(quant_type=one)) for one in types}
    assert document["sources"] == [str(place / "store" / "r.zarr")]
    assert set(document["all"]["errors"]) == {"fp8", "mxfp8", "mxfp4", "nvfp4", "hifp8"}


@pytest.mark.fault
def test_a_batch_of_three_types_is_collected_and_drawn_together_in_one_command(tmp_path: Path) -> None:
    types = ("bf16", "mxfp8", "hifp8")
    options = ("--mode", "batch", "--quant-type", ",".join(types), "--report", "draw", "--json")

    done = capd(*arguments(*options, job=(*JOB, "--checkpoint", "{run_dir}/step")), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert [one["outcome"] for one in json.loads(done.stdout)["types"]] == ["complete"] * 3
    assert "capd: draw: " in done.stderr
    assert "records of 3 quant types" in done.stderr
    assert_drawn(tmp_path, set(types))


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["single", "quick"])
def test_a_single_type_is_collected_and_drawn(tmp_path: Path, mode: str) -> None:
    done = capd(*arguments("--mode", mode, "--quant-type", "hifp8", "--report", "draw"), cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert_drawn(tmp_path, {"hifp8"})


@pytest.mark.fault
def test_a_plain_job_is_drawn_and_its_output_is_its_own(tmp_path: Path) -> None:
    job = (*JOB, "--steps", "2")

    done = capd(
        *arguments("--steps", "all", "--quant-type", "bf16", "--report", "draw", job=job), cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    assert "capd: draw: " in done.stderr
    assert "records of" not in done.stdout
    assert_drawn(tmp_path, {"bf16"})


@pytest.mark.fault
def test_a_type_that_fails_is_the_exit_code_and_the_others_are_drawn(tmp_path: Path) -> None:
    options = ("--mode", "batch", "--quant-type", "bf16,mxfp8", "--report", "draw")
    amount = ("--control-iter", "6", "--collect-micro-batches", "2")

    done = capd(*arguments(*options, *amount, job=(*JOB, "--crash", "mxfp8")), cwd=tmp_path)

    assert done.returncode == 1
    assert "not collected: mxfp8" in done.stderr
    document = json.loads((tmp_path / "draw" / "global_statistics.json").read_text())
    assert "bf16" in {group["quant_type"] for group in document["by"]["quant_type"]}


@pytest.mark.fault
def test_a_job_that_fails_is_the_exit_code_and_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    done = capd(
        *arguments("--steps", "all", "--quant-type", "bf16", "--report", "draw", job=(*JOB, "--crash", "bf16")),
        cwd=tmp_path, CUSTOM_QUANT_TYPE="bf16",
    )  # fmt: skip

    assert done.returncode == 1
    assert "no kernel for bf16" in done.stderr
    assert_drawn(tmp_path, {"bf16"})


def test_where_nothing_was_captured_the_code_of_the_job_stays_unless_it_is_0(tmp_path: Path) -> None:
    ended, fine = (
        capd(
            *arguments("--report", "draw", job=(sys.executable, "-c", f"raise SystemExit({code})")),
            cwd=tmp_path,
        )
        for code in (7, 0)
    )

    assert (ended.returncode, fine.returncode) == (7, 1)
    for done in (ended, fine):
        assert "no report: nothing was captured into" in done.stderr
    assert not (tmp_path / "draw").exists()


@pytest.mark.fault
def test_a_report_that_cannot_be_written_makes_1_of_0_and_keeps_the_run(tmp_path: Path) -> None:
    code = (
        "import pathlib, runpy, sys; pathlib.Path('draw').mkdir(); pathlib.Path('draw/hifp8.png').write_text('mine'); "
        f"sys.argv = ['job', '--steps', '1']; runpy.run_path({JOB[1]!r}, run_name='__main__')"
    )

    done = capd(
        *arguments("--steps", "all", "--report", "draw", job=(sys.executable, "-c", code)), cwd=tmp_path
    )

    assert done.returncode == 1
    assert "hifp8.png is there, and no report wrote it" in done.stderr
    assert (tmp_path / "draw" / "hifp8.png").read_text() == "mine"
    assert sum(len(series) for series in capd_package.open(tmp_path / "store" / "r.zarr").series)


@pytest.mark.slow
def test_what_cannot_become_a_report_is_refused_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "global_statistics.json").write_text("mine")
    job = (sys.executable, "-c", "open('started', 'w')")

    file = capd(*arguments("--report", "file", job=job), cwd=tmp_path)
    page = capd(*arguments("--report", "page.html", job=job), cwd=tmp_path)
    foreign = capd(*arguments("--report", "other", job=job), cwd=tmp_path)
    off = capd(*arguments("--report", "draw", job=job), cwd=tmp_path, CAPD_ENDPOINT="off")
    nodes = capd(*arguments("--report", "draw", job=job), cwd=tmp_path, SLURM_NNODES="2")

    assert [one.returncode for one in (file, page, foreign, off, nodes)] == [2, 2, 1, 2, 2]
    assert "is not a directory" in file.stderr
    assert "is not a directory" in page.stderr
    assert "no report wrote it" in foreign.stderr
    assert "there are no captures to draw" in off.stderr
    assert "spans 2 nodes" in nodes.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.fault
def test_a_job_that_ctrl_c_ends_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    command = arguments(
        "--steps", "all", "--quant-type", "bf16", "--report", "draw", job=(*JOB, "--hang", "bf16")
    )
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**environ_of(tmp_path), "CUSTOM_QUANT_TYPE": "bf16"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert any(line == "hanging\n" for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)

    assert process.returncode == 130
    assert "capd: draw: " in errors
    assert_drawn(tmp_path, {"bf16"})


@pytest.mark.fault
def test_an_interrupted_collection_says_what_draws_it(tmp_path: Path) -> None:
    options = ("--mode", "single", "--quant-type", "bf16", "--control-iter", "50", "--report", "draw")
    with subprocess.Popen(
        arguments(*options, job=(*JOB, "--hang", "bf16")), cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, env=environ_of(tmp_path),
    ) as process:  # fmt: skip
        log = tmp_path / "store" / "r.collection" / "logs" / "bf16.log"
        until(lambda: log.exists() and "step" in log.read_text(), 60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)

    assert process.returncode == 130
    assert "nothing was drawn; `capd report " in errors
    assert not (tmp_path / "draw").exists()
