"""Jobs whose models compute in another number format because `capd run` was told so, with their script as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import capd
from capd_client.config.recipe import Recipe
from tests.kit import forking
from tests.kit.jobs.products import assert_products_hold
from tests.kit.launching import assert_trained
from tests.kit.paths import REPOSITORY

JOB = str(Path(__file__).with_name("emulated_job.py"))
MXFP8 = Recipe.of("mxfp8").text()

pytestmark = pytest.mark.timeout(240)


class Done(NamedTuple):
    losses: list[list[str]]  # of each rank, exact
    said: str
    run: Path

    def emulations(self) -> set[str]:
        return {series.attributes["emulation"] for series in capd.open(self.run).series}


def job(
    directory: Path, *options: str, ranks: int = 1, capture: tuple[str, ...] | None = (), **environ: str
) -> Done:
    """Run the job under `capd run` with the options `capture`; None: without capd."""
    directory.mkdir()
    command = [sys.executable, JOB, str(directory), *options]
    if ranks > 1:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command = [*torchrun, *command[1:]]
    else:
        command.append("--single")
    if capture is not None:
        run = [sys.executable, "-m", "capd", "run", "--store", str(directory), "--run-id", "r", *capture]
        command = [*run, "--", *command]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CAPD_")}
    environ = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environ}
    done = forking.run(
        command, env={**clean, **environ}, capture_output=True, text=True, timeout=200,
        imports="" if "capd" in command else forking.TRAINING, inner=forking.TRAINING,
    )  # fmt: skip
    if capture is None:
        assert_trained(done)
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        # A job that names its types itself saves its own tensors, of no module.
        if "--no-watch" not in capture and "early" not in options:
            assert_products_hold(directory / "r.zarr")
    losses = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return Done(losses, done.stderr, directory / "r.zarr")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.fault)])
def test_an_unchanged_script_trains_in_the_format_that_capd_run_names(ranks: int, tmp_path: Path) -> None:
    bare = job(tmp_path / "bare", ranks=ranks, capture=None)
    label = job(tmp_path / "label", ranks=ranks, capture=("--quant-type", "mxfp8", "--label-only"))
    run = job(tmp_path / "run", ranks=ranks, capture=("--quant-type", "mxfp8"))
    own = job(tmp_path / "own", "--emulate", "mxfp8", "--watch", ranks=ranks)

    assert label.losses == bare.losses  # to the last bit
    assert run.losses == own.losses != bare.losses
    assert label.emulations() == {"none"}
    assert run.emulations() == own.emulations() == {MXFP8}
    assert f"emulated: {MXFP8}" in run.said
    assert "a label: --label-only" in label.said
    # What is recorded are the operands before they are quantised: the first one is that of the plain job.
    first = [
        capd.open(done.run).find(quant_type="mxfp8", rank=0, module="layers.0.qkv", tensor_name="input")
        for done in (label, run)
    ]
    assert torch.equal(first[0][0].torch(0), first[1][0].torch(0))
    assert {series.key.rank for series in capd.open(run.run).series} == set(range(ranks))
    [weight] = capd.open(run.run).find(rank=ranks - 1, module="layers.0.qkv", tensor_name="weight")
    shown = forking.run(
        [sys.executable, "-m", "capd", "show", str(run.run), weight.path],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert MXFP8 in shown.stdout


@pytest.mark.parametrize(
    ("capture", "options", "environ"),
    [
        pytest.param(("--no-watch", "--quant-type", "mxfp8"), (), {}, id="nothing is watched"),
        pytest.param(
            ("--quant-type", "mxfp8", "--steps", "2"),
            (),
            {},
            id="a later step is captured",
            marks=pytest.mark.fault,
        ),
        pytest.param(
            ("--quant-type", "mxfp8"), ("--watch",), {}, id="the script watches", marks=pytest.mark.fault
        ),
        pytest.param(
            (),
            (),
            {"CAPD_EMULATE": MXFP8, "CUSTOM_QUANT_TYPE": "mine"},
            id="a recipe of one's own",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--quant-type", "mxfp4"),
            ("--emulate", "mxfp8", "--watch"),
            {},
            id="the script's own wins",
            marks=pytest.mark.fault,
        ),
    ],
)
def test_the_whole_job_is_emulated_whatever_of_it_is_captured(
    capture: tuple[str, ...],
    options: tuple[str, ...],
    environ: dict[str, str],
    emulated: Done,
    tmp_path: Path,
) -> None:
    done = job(tmp_path / "job", *options, capture=capture, **environ)

    assert done.losses == emulated.losses
    assert f"emulated: {MXFP8}" in done.said
    if "--no-watch" not in capture:
        assert done.emulations() == {MXFP8}


def test_a_file_with_a_recipe_is_trained_and_names_the_captures(bare: Done, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[recipe]\nname = "mine-4"\n[recipe.fprop]\nx = "mxfp4"\n[recipe.wgrad]\ng = "mxfp8"\n')

    done = job(tmp_path / "job", capture=("--quant-type", str(file)))

    assert done.losses != bare.losses
    [text] = done.emulations()
    assert json.loads(text)["linear"]["name"] == "mine-4"
    assert {series.key.quant_type for series in capd.open(done.run).series} == {"mine-4"}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return job(tmp_path_factory.mktemp("emulated") / "job", capture=("--quant-type", "mxfp8"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return job(tmp_path_factory.mktemp("bare") / "job", capture=None)


def test_a_variable_of_tensor_saver_alone_only_labels(bare: Done, tmp_path: Path) -> None:
    done = job(tmp_path / "job", CUSTOM_QUANT_TYPE="mxfp8", CAPD_QUANT_TYPE="mxfp8")

    assert done.losses == bare.losses
    assert done.emulations() == {"none"}
    assert {series.key.quant_type for series in capd.open(done.run).series} == {"mxfp8"}


@pytest.mark.slow
def test_a_word_that_is_no_format_labels_and_says_so(bare: Done, tmp_path: Path) -> None:
    done = job(tmp_path / "job", capture=("--quant-type", "nightly-7"))

    assert done.losses == bare.losses
    assert "nightly-7 is no number format" in done.said
    assert done.emulations() == {"none"}


@pytest.mark.slow
def test_a_job_that_names_its_types_itself_is_never_quantised_twice(bare: Done, tmp_path: Path) -> None:
    early = job(tmp_path / "early", "--calls", "early", capture=("--quant-type", "mxfp8"))
    assert early.losses == bare.losses
    assert early.emulations() == {"none"}
    assert "quant_type is a label: the job names its quant types itself" in early.said

    late = job(tmp_path / "late", "--calls", "late", capture=("--quant-type", "mxfp8", "--steps", "all"))
    assert late.losses[0][:2] != bare.losses[0][:2]
    assert "the emulation of its models is removed" in late.said
    assert "run the job again with --label-only" in late.said
    by_step: dict[int, set[str]] = {}
    for series in capd.open(late.run).find(module="layers.0.qkv", tensor_name="input"):
        for record in series.records:
            by_step.setdefault(record.iteration, set()).add(record.attributes["emulation"])
    assert by_step == {0: {MXFP8}, 1: {MXFP8}, 2: {"none"}}


@pytest.mark.slow
def test_a_job_without_a_model_to_find_is_told_that_nothing_was_emulated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "capd", "run", "--store", str(tmp_path), "--quant-type", "mxfp8", "--"]
    done = forking.run(
        [*command, sys.executable, "-c", "import torch"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )

    assert "nothing was emulated, quant_type is a label: no training forward was seen" in done.stderr


@pytest.mark.fault
def test_each_type_of_a_batch_is_trained_in_its_own_format(
    bare: Done, emulated: Done, tmp_path: Path
) -> None:
    types = ("mxfp8", "mxfp4", "hifp8", "bf16", "nightly")
    command = [
        sys.executable,
        "-m",
        "capd",
        "run",
        "--store",
        str(tmp_path),
        "--run-id",
        "r",
        "--mode",
        "batch",
    ]
    options = ["--quant-type", ",".join(types), "--control-iter", "3", "--json"]
    done = subprocess.run(
        [*command, *options, "--", sys.executable, JOB, "{run_dir}", "--single"], timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    runs = tmp_path / "r.collection" / "runs"
    losses = {name: json.loads((runs / name / "rank0.json").read_text()) for name in types}
    assert losses["bf16"] == losses["nightly"] == bare.losses[0]
    assert losses["mxfp8"] == emulated.losses[0]
    assert len({tuple(values) for values in losses.values()}) == 4
    recipes = {name: Recipe.of(name).text() if name in types[:3] else "none" for name in types}
    report = json.loads(done.stdout)
    assert {one["quant_type"]: one["emulation"] for one in report["types"]} == recipes
    assert {name: list(said) for name, said in report["emulation"].items()} == {
        name: [recipe] for name, recipe in recipes.items()
    }
    text = (tmp_path / "r.collection" / "report.txt").read_text()
    assert f"hifp8: emulation: {recipes['hifp8']}" in text
    assert "nightly: a label" in text
    assert "nightly, 5 of 5 (a label: nightly is no number format that capd emulates)" in done.stderr


@pytest.mark.fault
def test_export_and_import_keep_what_was_emulated(emulated: Done, tmp_path: Path) -> None:
    for command in (
        ["export", str(emulated.run), "--out", str(tmp_path / "files")],
        ["import", str(tmp_path / "files"), "--store", str(tmp_path / "back"), "--run-id", "r"],
    ):
        subprocess.run([sys.executable, "-m", "capd", *command], capture_output=True, timeout=100, check=True)

    again = Done([], "", tmp_path / "back" / "r.zarr")
    assert {
        record.attributes["emulation"] for series in capd.open(again.run).series for record in series.records
    } == {MXFP8}
