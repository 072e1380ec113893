"""`capd compare A B --logical`: what it prints of two small runs, its exit codes, and the options that it refuses."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd_client.protocol.key import Moment
from tests.kit.paths import REPOSITORY
from tests.kit.store.cli import Result, StoreWriter
from tests.kit.store.parts import linear, placed

Capd = Callable[..., Result]
DRAW = np.random.default_rng(5)
X, W = (DRAW.standard_normal((4, 4)).astype(np.float32) for _ in range(2))
Array = np.ndarray[Any, Any]
OUTPUT = "layers.0.fc1.forward.output"


def write(
    root: Path,
    ranks: int,
    by: float = 1.0,
    *,
    x: Array = X,
    batches: int = 1,
    dtype: str = "float32",
    **told: Any,
) -> Path:
    """One linear whose output is wrong by a factor; its weight and output are split over the ranks."""
    writer = StoreWriter(root, "node0")
    for number, rank in itertools.product(range(batches), range(ranks)):
        rows = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
        own = x + np.float32(number)
        output = np.float32(by) * (own @ W.T)
        for order, (tensor, placement, values) in enumerate(
            (("input", "R", own), ("weight", "S(0)", W[rows]), ("output", "S(-1)", output[:, rows]))
        ):
            attributes = {**placed("tp", placement, rank, ranks, batch_dims=[]), **told}
            moment = Moment(iteration=0, micro_batch=number, time_ns=1 + order + 10 * number)
            if tensor != "weight" or number == 0:
                key = linear(tensor, rank=rank)
                writer.put("run", key, values.astype(dtype), dtype, moment, attributes=attributes)
    return writer.close() / "run.zarr"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write(tmp_path / "one", 1)


def test_a_sound_layout_ends_with_0(capd: Capd, one: Path, tmp_path: Path) -> None:
    done = capd("compare", one, write(tmp_path / "tp2", 2), "--logical")
    assert (done.code, done.err) == (0, "")
    assert (
        "3 tensors, 3 comparisons: 0 beyond the limit, 3 bit-equal; 1 micro-batch paired by content"
        in done.out
    )
    assert (
        "limits are a guess, 4 times the roundings of the products until then; --noise measures them"
        in done.out
    )
    assert "first divergence" not in done.out


def test_a_factor_is_named_with_the_size_that_it_equals_and_ends_with_1(
    capd: Capd, one: Path, tmp_path: Path
) -> None:
    other = write(tmp_path / "tp2", 2, by=2.0)
    noise = write(tmp_path / "noise", 1, by=1 + 1e-6)
    done = capd("compare", one, other, "--logical", "--noise", noise)
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[1].startswith(OUTPUT)
    assert "× 2.000 (residual 0 eps): equals tp_size" in lines[1]
    assert f"first divergence: iteration 0, micro-batch 0: {OUTPUT}, whose captured inputs agree" in done.out
    assert "limits: 4 times the largest error of 1 noise run, at least 2 eps" in done.out

    forgiven = capd("compare", one, other, "--logical", "--noise", noise, "--up-to-scale")
    assert forgiven.code == 0
    wide = capd("compare", one, write(tmp_path / "near", 2, by=1 + 1e-5), "--logical", "--noise", noise)
    lenient = capd("compare", one, tmp_path / "near", "--logical", "--noise", noise, "--limit", "20x")
    assert (wide.code, lenient.code) == (1, 0)


def test_the_document_has_the_fields_that_json_md_lists(capd: Capd, one: Path, tmp_path: Path) -> None:
    done = capd(
        "compare", one, write(tmp_path / "tp2", 2, by=2.0), "--logical", "--json", "--first-divergence"
    )
    found, told = done.json, (REPOSITORY / "docs" / "json.md").read_text("utf-8")
    told = told.partition("### Two layouts")[2].partition("\n## ")[0]
    assert done.code == 1
    assert found["complete"] is False
    assert found["first_divergence"]["tensor"] == OUTPUT
    assert (found["first_divergence"]["factor"], found["first_divergence"]["equals"]) == (2.0, ["tp_size"])
    fields = {*found, *found["tensors"][0], *found["first_divergence"], *found["samples"], *found["other"]}
    assert [field for field in sorted(fields) if f"`{field}`" not in told] == []


def test_csv_has_a_row_for_each_tensor(capd: Capd, one: Path, tmp_path: Path) -> None:
    done = capd("compare", one, write(tmp_path / "tp2", 2), "--logical", "--csv")
    found = list(csv.DictReader(io.StringIO(done.out)))
    assert {row["tensor"].rpartition(".")[2] for row in found} == {"input", "weight", "output"}
    assert {row["error"] for row in found} == {"0.0"}


def test_dropout_is_said(capd: Capd, one: Path, tmp_path: Path) -> None:
    done = capd("compare", one, write(tmp_path / "tp2", 2, dropout=0.1), "--logical")
    assert "the job has dropout, which ranks draw differently in each layout" in done.err


def test_names_of_another_framework_come_from_a_file(capd: Capd, one: Path, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('[[module]]\nleft = "layers.*.fc1"\nright = "layers.*.fc1"\n', "utf-8")
    other = write(tmp_path / "tp2", 2)
    assert capd("compare", one, other, "--logical", "--map", tmp_path / "map.toml").code == 0
    (tmp_path / "map.toml").write_text('[[module]]\nleft = "layers.*.fc1"\nright = "fc1"\n', "utf-8")
    refused = capd("compare", one, other, "--logical", "--map", tmp_path / "map.toml")
    assert refused.code == 2
    assert "line 3: 'fc1' has 0 wildcards" in refused.err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--limit", "-1x", "--logical"), "--limit '-1x': write a number of estimates above 0"),
        (("--limit", "nan", "--logical"), "--limit 'nan'"),
        (("--map", "nope", "--logical"), "give one of megatron-hf, megatron-torchtitan, or a TOML file"),
        (
            ("--tolerance", "1", "--logical"),
            "--tolerance means nothing for a comparison of whole tensors (--logical)",
        ),
        (("--by", "layer", "--logical"), "--by means nothing"),
        (
            ("--limit", "4x"),
            "--limit means nothing for a comparison of anything but whole tensors (--logical)",
        ),
        (("--samples", "random", "--logical"), "'random': use one of content, megatron, interleaved"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    capd: Capd, one: Path, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    done = capd("compare", one, write(tmp_path / "tp2", 2), *options)
    assert done.code == 2
    assert told in " ".join(done.err.split())


def test_one_run_and_a_missing_rank_are_refused(capd: Capd, one: Path, tmp_path: Path) -> None:
    assert "--logical compares two runs" in capd("compare", one, "--logical").err
    other = write(tmp_path / "tp2", 2)
    assert capd("rm", other, "--series", "*rank1*weight*", "--yes").code == 0
    done = capd("compare", one, other, "--logical")
    assert done.code == 2
    assert "parts are missing: tp 1 (rank 1" in done.err


def test_a_run_with_nan_is_named_and_one_that_is_noise_is_refused(
    capd: Capd, one: Path, tmp_path: Path
) -> None:
    broken = write(tmp_path / "nan", 1, by=np.nan)
    for runs, where in (
        ((one, broken), "the other run"),
        ((broken, one), "the reference"),
        ((broken, broken), "both"),
    ):
        done = capd("compare", *runs, "--logical")
        assert done.code == 1
        assert f"first divergence: iteration 0, micro-batch 0: {OUTPUT}" in done.out
        assert f"NaN or Inf in {where}" in done.out
    done = capd("compare", one, write(tmp_path / "tp2", 2), "--logical", "--noise", broken)
    assert done.code == 2
    assert f"{OUTPUT} at iteration 0 holds NaN or Inf, and the reference none" in done.err


def test_a_noise_run_is_neither_of_the_runs_and_is_perturbed(capd: Capd, one: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "tp2", 2)
    for noise, what in ((one, "the reference"), (other, "the run that is compared")):
        done = capd("compare", one, other, "--logical", "--noise", noise)
        assert done.code == 2
        assert f"is {what}, so it measures no rounding" in done.err
    plain = capd("compare", one, other, "--logical", "--noise", write(tmp_path / "plain", 1))
    assert plain.code == 0
    assert "was captured without --perturb: limits are as small as its differences" in plain.err
    perturbed = write(tmp_path / "perturbed", 1, perturb="1e-7")
    assert capd("compare", one, other, "--logical", "--noise", perturbed).err == ""
    swapped = capd("compare", perturbed, other, "--logical")
    assert "was captured with --perturb 1e-7: its input differs" in swapped.err


def test_micro_batches_of_another_number_are_counted_and_of_another_size_refused(
    capd: Capd, one: Path, tmp_path: Path
) -> None:
    more = write(tmp_path / "more", 2, batches=3)
    done = capd("compare", one, more, "--logical")
    assert done.code == 0
    assert "1 micro-batch of 1 and 3 paired by content" in done.out
    assert f"left out: 2 of 3 micro-batches of {more}, which the other run does not have" in done.err
    samples = capd("compare", one, more, "--logical", "--json").json["samples"]
    assert (samples["pairs"], samples["unpaired"], samples["reference"], samples["other"]) == (1, 2, 1, 3)

    halves = write(tmp_path / "halves", 1, x=X[:2], batches=2)
    refused = capd("compare", one, halves, "--logical")
    assert refused.code == 2
    assert (
        "micro-batches have other shapes: layers.0.fc1.forward.input is [4, 4] in 1 micro-batch of"
        in refused.err
    )
    assert "and [2, 4] in 2 micro-batches of" in refused.err
    assert "rows are not regrouped" in refused.err


def test_dtypes_that_differ_are_told(capd: Capd, one: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "half", 1, dtype="float16")
    done = capd("compare", one, other, "--logical")
    assert "3 comparisons of float32 with float16: limits are those of the coarser one" in done.out
    told = capd("compare", one, other, "--logical", "--json").json["other_dtypes"]
    assert told == [{"reference": "float32", "other": "float16", "comparisons": 3}]
