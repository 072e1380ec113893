"""`capd metrics` and `capd plot … trend`: tables, JSON, CSV and figures, and what they say where there is no number."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

from capd.cli.report.trends import TREND_WORDS
from capd.formats import encode, qdq
from capd.report.trends.kinds import TRENDS
from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, bf16_bits, damaged, linear_key

Capd = Callable[..., Result]
STEPS, LAYERS = 4, (0, 1)
TENSORS = {
    "input": ("forward", (24, 64)),
    "weight": ("forward", (32, 64)),
    "grad_output": ("backward", (24, 32)),
}


def values_of(name: str, layer: int, step: int) -> np.ndarray:
    """What the run holds: weights that move a little, and activations with one hot channel."""
    _, shape = TENSORS[name]
    rng = np.random.default_rng([layer, step, len(name)])
    if name == "weight":
        rng = np.random.default_rng(layer)
        return rng.normal(size=shape) + 0.02 * step * rng.normal(size=shape)
    found = rng.normal(size=shape) * (1 + step)
    if name == "input":
        found[:, 5] *= 50
    return found


def tensor_of(name: str, layer: int, step: int) -> torch.Tensor:
    bits = bf16_bits(values_of(name, layer, step)).astype(np.uint16)
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, four iterations, three tensors; and statistics alone of another quant type."""
    root = tmp_path_factory.mktemp("runs")
    writer = StoreWriter(root)
    for layer, step, (name, (operation, _)) in product(LAYERS, range(STEPS), TENSORS.items()):
        bits = bf16_bits(values_of(name, layer, step))
        for one in ("bf16", "kept"):
            key = linear_key(
                quant_type=one,
                layer=layer,
                tensor_name=name,
                operation=operation,
                module=f"blocks.{layer}.fc",
            )
            writer.put("run", key, bits, "bfloat16", Moment(iteration=step, time_ns=1), payload=one == "bf16")
    return writer.close() / "run.zarr"


def metric(done: Result, name: str) -> dict[str, Any]:
    assert done.code == 0, done.err
    [found] = [one for one in done.json["metrics"] if one["metric"] == name]
    return found  # type: ignore[no-any-return]


def group(found: dict[str, Any], **fields: Any) -> dict[str, Any]:
    [one] = [one for one in found["groups"] if fields.items() <= one.items()]
    return one  # type: ignore[no-any-return]


def test_the_words_of_the_help_are_those_of_the_metrics(capd: Capd) -> None:
    assert list(TREND_WORDS) == list(TRENDS)
    for command in ("metrics", "plot"):
        assert capd(command, "--help").code == 0


def test_the_noise_ratio_of_each_step_is_that_of_its_tensors_together(capd: Capd, run: Path) -> None:
    found = metric(
        capd(
            "metrics", run, "--metric", "noise-ratio", "--formats", "mxfp4", "--quant-type", "bf16", "--json"
        ),
        "noise-ratio",
    )

    one = group(found, tensor_name="grad_output", label="mxfp4")
    assert [step["iteration"] for step in one["steps"]] == list(range(STEPS))
    signal = noise = 0.0
    for step in range(STEPS):
        tensors = [tensor_of("grad_output", layer, step) for layer in LAYERS]
        own = sum(float((x.double() ** 2).sum()) for x in tensors)
        lost = sum(float(((qdq(x.float(), "mxfp4").double() - x.double()) ** 2).sum()) for x in tensors)
        assert one["steps"][step]["ratio"] == pytest.approx(math.sqrt(own / lost), rel=1e-9)
        signal, noise = signal + own, noise + lost
    assert one["all"]["ratio"] == pytest.approx(math.sqrt(signal / noise), rel=1e-9)
    assert one["all"]["values"] == len(LAYERS) * STEPS * 24 * 32


def test_oscillation_and_channels_follow_each_tensor(capd: Capd, run: Path) -> None:
    done = capd(
        "metrics", run, "--metric", "oscillation,channels", "--formats", "mxfp4", "--by", "layer,tensor_name",
        "--quant-type", "bf16", "--top", "1", "--json",
    )  # fmt: skip

    changed = 0
    for step in range(1, STEPS):
        codes = [encode(tensor_of("weight", 0, at).float(), "mxfp4").payload % 16 for at in (step - 1, step)]
        changed += int((codes[0].where(codes[0] != 8, 0) != codes[1].where(codes[1] != 8, 0)).sum())
    weight = group(metric(done, "oscillation"), layer=0, tensor_name="weight")
    assert weight["all"]["pairs"] == STEPS - 1
    assert weight["all"]["changed_percent"] == pytest.approx(100 * changed / (32 * 64 * (STEPS - 1)))
    hot = group(metric(done, "channels"), layer=1, tensor_name="input")["all"]
    assert (hot["jaccard_previous"], hot["jaccard_first"], hot["sets"]) == (1, 1, STEPS)
    assert hot["energy_percent"] > 90


def test_the_amax_history_is_known_from_statistics_alone(capd: Capd, run: Path) -> None:
    words = (
        "metrics",
        run,
        "--metric",
        "amax-history",
        "--window",
        "1,2",
        "--margin",
        "0,1",
        "--tensor",
        "grad_output",
    )
    read, kept = (
        metric(capd(*words, "--quant-type", one, "--json"), "amax-history") for one in ("bf16", "kept")
    )
    for window, margin in product((1, 2), (0, 1)):
        label = f"window={window} margin={margin}"
        one, other = (group(found, label=label)["all"] for found in (read, kept))
        assert other["overflow_percent"] is None
        assert one["overflow_percent"] >= 0
        without = [{k: v for k, v in of.items() if k != "overflow_percent"} for of in (one, other)]
        assert without[0] == without[1]
    # It grows from step to step: each step is beyond what the last one allows.
    assert group(read, label="window=1 margin=0")["all"]["overflow_steps_percent"] > 0


@pytest.mark.parametrize("name", list(TRENDS))
def test_every_metric_has_a_table_a_csv_and_a_figure(
    capd: Capd, run: Path, tmp_path: Path, name: str
) -> None:
    words = ("metrics", run, "--metric", name, "--quant-type", "bf16")
    table, rows = capd(*words), capd(*words, "--csv")
    figure = capd(
        "plot",
        run,
        "trend",
        "--metric",
        name,
        "-o",
        tmp_path / "x.png",
        "--dpi",
        "40",
        "--quant-type",
        "bf16",
    )

    assert (table.code, rows.code, figure.code) == (0, 0, 0), (table.err, rows.err, figure.err)
    assert table.out.startswith(TRENDS[name].title)
    read = list(csv.DictReader(io.StringIO(rows.out)))
    assert {row["metric"] for row in read} == {name}
    assert {row["iteration"] for row in read} >= {"", "0" if not TRENDS[name].pairs else "1"}
    drawn = {row["number"] for row in read}
    assert set(TRENDS[name].plotted) <= drawn
    files = sorted(tmp_path.iterdir())
    assert [matplotlib.image.imread(path).ndim for path in files] == [3] * len(files) != []


def test_several_metrics_go_into_one_csv_and_a_figure_each(capd: Capd, run: Path, tmp_path: Path) -> None:
    words = ("metrics", run, "--metric", "kurtosis,rank", "--quant-type", "bf16")
    printed = capd(*words, "--csv")
    written, drawn = capd(*words, "-o", tmp_path / "x.csv"), capd(*words, "-o", tmp_path / "x.svg")
    again = capd(*words, "-o", tmp_path / "x.csv")

    assert (written.code, drawn.code) == (0, 0)
    assert (tmp_path / "x.csv").read_text() == printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x_1.svg", "x_2.svg"]
    assert again.code == 1
    assert "exists already" in again.err


def test_the_same_records_give_the_same_bytes_whatever_the_workers(
    capd: Capd, run: Path, tmp_path: Path
) -> None:
    words = (
        "metrics",
        run,
        "--metric",
        "noise-ratio,scales,kurtosis,oscillation,rank",
        "--quant-type",
        "bf16",
        "--json",
    )
    assert capd(*words, "--workers", "1").out == capd(*words, "--workers", "4").out
    for at in (1, 2):
        assert (
            capd(
                "plot",
                run,
                "trend",
                "-o",
                tmp_path / f"{at}.svg",
                "--quant-type",
                "bf16",
                "--tensor",
                "input",
            ).code
            == 0
        )
    assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--metric", "beauty"), "use some of noise-ratio, scales,"), (("--formats", "mxfp9"), "mxfp9"),
        (("--by", "colour"), "is no field"), (("--metric", "kurtosis", "--formats", "mxfp8"), "takes no --formats"),
        (("--window", "0"), "from 1 to 65536"), (("--margin", "-1"), "from 0 to 64"),
        (("--hadamard", "24"), "power of two"), (("--csv", "--json"), "one output"),
        (("--hadamard", "256"), "from 2 to 128"), (("-o", "x.gif"), "must end in .csv, .png"),
        (("--margin", ",".join(map(str, range(20)))), "at most 16"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_anything_is_read(
    capd: Capd, run: Path, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    done = capd("metrics", run, *words, cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-o", "x.gif"), "must end in .png"), (("-o", "x.png", "--metric", "sqnr"), "use some of noise-ratio"),
        (("-o", "x.png", "--metric", "rank,scales"), "draws one metric"),
        (("-o", "x.png", "--size", "x"), "as 3.3x2.5"),
    ],
)  # fmt: skip
def test_a_figure_of_a_trend_is_refused_in_words(
    capd: Capd, run: Path, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    done = capd("plot", run, "trend", *words, cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_statistics_alone_have_no_metric_of_elements(capd: Capd, run: Path, tmp_path: Path) -> None:
    done = capd("metrics", run, "--quant-type", "kept")
    drawn = capd("plot", run, "trend", "-o", tmp_path / "x.png", "--quant-type", "kept")
    both = capd("metrics", run, "--metric", "kurtosis", "--json")
    assert (done.code, drawn.code, both.code) == (5, 5, 0)
    assert "only its statistics were kept" in done.err
    assert "only its statistics were kept" in drawn.err
    assert metric(both, "kurtosis")["unmeasured"] == [
        {"reason": "only its statistics were kept", "records": len(LAYERS) * STEPS * len(TENSORS)}
    ]


def stored(root: Path, *arrays: np.ndarray, dtype: str = "float32", first: int = 0) -> Path:
    writer = StoreWriter(root)
    for step, array in enumerate(arrays, first):
        writer.put("run", linear_key(), array, dtype, Moment(iteration=step, time_ns=1))
    return writer.close() / "run.zarr"


ALL = ",".join(one for one in TRENDS)


def test_a_single_step_has_nothing_to_compare_and_says_so(capd: Capd, tmp_path: Path) -> None:
    done = capd(
        "metrics",
        stored(tmp_path, np.ones((4, 32), np.float32)),
        "--metric",
        "oscillation,amax-history,channels",
    )
    assert done.code == 0
    for name in ("oscillation", "amax-history", "channels"):
        assert f"{name}: no tensor has two captured steps" in done.err


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ([np.zeros((4, 32), np.float32)] * 2, "it has only zeros"),
        ([np.full((4, 32), 3.0, np.float32)] * 2, "accumulation"),
        ([np.full((4, 32), np.nan, np.float32)] * 2, "it has no finite value"),
        ([np.zeros((0, 32), np.float32)] * 2, "no values"),
        ([np.float32(3).reshape(())] * 2, "fewer than two dimensions"),
        ([np.ones((4, 32), np.float32), np.ones((2, 8), np.float32)], "accumulation"),
    ],
    ids=["zeros", "constant", "nan", "empty", "scalar", "shapes"],
)
def test_odd_tensors_are_answered_in_words(
    capd: Capd, tmp_path: Path, arrays: list[np.ndarray], says: str
) -> None:
    run = stored(tmp_path, *arrays)
    done, document = capd("metrics", run, "--metric", ALL), capd("metrics", run, "--metric", ALL, "--json")
    assert (done.code, document.code) == (0, 0), done.err
    assert "internal error" not in done.err
    assert says in done.err
    figure = capd("plot", run, "trend", "--metric", "kurtosis", "-o", tmp_path / "x.png", "--dpi", "40")
    assert figure.code == 0


def test_a_run_that_began_again_is_not_compared_across_the_gap(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    for attempt, steps in ((0, (0, 1, 2)), (1, (1, 2))):
        for step in steps:
            bits = np.full((4, 32), float(1 + attempt), np.float32)
            writer.put(
                "run", linear_key(), bits, "float32", Moment(iteration=step, attempt=attempt, time_ns=1)
            )
    run = writer.close() / "run.zarr"
    found = metric(
        capd("metrics", run, "--metric", "oscillation", "--formats", "hifp8", "--attempt", "all", "--json"),
        "oscillation",
    )
    [one] = found["groups"]
    assert (one["all"]["pairs"], one["all"]["changed_percent"]) == (3, 0)


def test_low_precision_records_are_named_with_the_reason(capd: Capd, tmp_path: Path) -> None:
    run = stored(tmp_path, np.ones((4, 32), np.int32), dtype="int32")
    done = capd("metrics", run)
    assert done.code == 5
    assert "int32 is no high-precision source" in done.err


def test_damaged_records_are_skipped_and_the_rest_is_measured(capd: Capd, tmp_path: Path) -> None:
    run = damaged(tmp_path)
    done = capd("metrics", run, "--metric", "kurtosis,amax-history", "--json")
    assert done.code == 4
    assert len(done.json["skipped"]) == 1
    assert done.json["records"] == 3
    assert group(done.json["metrics"][0], tensor_name="input")["all"]["kurtosis"] == pytest.approx(3, abs=0.1)


def test_files_are_measured_but_not_followed(capd: Capd, run: Path, tmp_path: Path) -> None:
    assert capd("export", run, "--out", tmp_path / "files", "--quant-type", "bf16").code == 0
    words = ("--metric", "kurtosis,noise-ratio", "--json")
    of_run, of_files = (
        capd("metrics", place, *words, *more)
        for place, more in ((run, ("--quant-type", "bf16")), (tmp_path / "files", ()))
    )
    assert of_files.code == 0, of_files.err
    for one, other in zip(of_run.json["metrics"], of_files.json["metrics"], strict=True):
        assert [each["all"] for each in one["groups"]] == [each["all"] for each in other["groups"]]
    refused = capd("metrics", tmp_path / "files", "--metric", "oscillation")
    assert refused.code == 2
    assert "`capd import` makes a run" in refused.err


def test_a_sample_reads_a_part_and_says_so(capd: Capd, run: Path) -> None:
    done = capd("metrics", run, "--metric", "kurtosis", "--quant-type", "bf16", "--sample", "50%", "--json")
    sample = done.json["sample"]
    assert (sample["records"], sample["of_records"]) == (12, 24)
    assert "12 of 24 records were read" in done.err


def test_products_are_measured_where_input_and_weight_were_captured(capd: Capd, run: Path) -> None:
    done = capd("metrics", run, "--metric", "accumulation", "--quant-type", "bf16", "--by", "layer", "--json")
    found = metric(done, "accumulation")
    assert found["products"] == {"found": 8, "measured": 8, "left_out": 0}
    assert {one["label"] for one in found["groups"]} == {
        "captured fp32", "captured bf16", "captured 14-bit", "captured 14-bit promoted",
    }  # fmt: skip
    alone = capd("metrics", run, "--metric", "accumulation", "--quant-type", "bf16", "--tensor", "weight")
    assert alone.code == 5
    assert "were not both captured" in alone.err
