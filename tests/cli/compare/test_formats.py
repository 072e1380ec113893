"""`capd compare STORE`: the error of each format per group, against numpy on what `capd.formats` gives."""

from __future__ import annotations

import csv
import io
import math
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capd.formats import qdq
from capd.io.sample import places_of
from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, bf16_bits, linear_key
from tests.kit.store.pt_files import SEED_NAME, seed_dictionary

Capd = Callable[..., Result]
SCALES = {"input": 1.0, "weight": 0.02, "grad_output": 1e-5}
FORMATS = "mxfp8,mxfp4,nvfp4,hifp8,fp8"
HELP = """
import sys
from capd.cli.app import main
try:
    main(["compare", "--help"])
finally:
    print([name for name in ("torch", "zarr", "numpy") if name in sys.modules])
"""
Values = dict[tuple[str, int, int], torch.Tensor]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Values]:
    """A run with bfloat16 tensors, and their values by (tensor, layer, iteration); and what has no such source."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(2)
    writer, values = StoreWriter(root), {}
    for tensor, layer, iteration in product(SCALES, (0, 1), (0, 1)):
        bits = bf16_bits(rng.normal(scale=SCALES[tensor], size=(48, 80)).astype(np.float32))
        values[tensor, layer, iteration] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        key = linear_key(
            layer=layer, tensor_name=tensor, phase="post" if layer else "pre", module=f"m{layer}"
        )
        writer.put("run", key, bits, "bfloat16", Moment(iteration=iteration))
    writer.put("run", linear_key(tensor_name="ids"), np.arange(4), "int64", Moment())
    for number in range(2):
        key = linear_key(tensor_name="input", quant_type="fp8")
        writer.put("run", key, np.full((4, 4), 7, np.uint8), "float8_e4m3fn", Moment(iteration=number))
    key = linear_key(tensor_name="norm", module="norm")
    writer.put("run", key, bf16_bits(np.ones(64, np.float32)), "bfloat16", Moment())
    writer.put(
        "run", linear_key(quant_type="statistics"), bf16_bits(np.ones(8)), "bfloat16", Moment(), payload=False
    )
    writer.close()
    return root / "run.zarr", values


def expected(tensors: list[torch.Tensor], fmt: str, **options: Any) -> dict[str, float]:
    x = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).numpy()
    y = torch.cat([qdq(tensor.float(), fmt, **options).double().reshape(-1) for tensor in tensors]).numpy()
    d = y - x
    return {
        "count": x.size,
        "sqnr_db": 10 * math.log10((x**2).sum() / (d**2).sum()),
        "mse": (d**2).mean(),
        "max_abs": np.abs(d).max(),
        "relative": np.abs(d).sum() / np.abs(x).sum(),
        "cosine": (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()),
        "underflows": ((x != 0) & (y == 0)).sum(),
    }


def test_every_group_has_the_error_of_every_format_on_its_tensors(
    capd: Capd, known: tuple[Path, Values]
) -> None:
    run, values = known

    found = capd("compare", run, "--formats", FORMATS, "--by", "layer,phase,tensor_name", "--json")

    assert found.code == 0
    document = found.json
    assert [each["label"] for each in document["formats"]] == FORMATS.split(",")
    assert document["by"] == ["layer", "phase", "tensor_name"]
    places = {(group["layer"], group["phase"], group["tensor_name"]): group for group in document["groups"]}
    assert set(places) == {*((layer, ("pre", "post")[layer], name) for layer in (0, 1) for name in SCALES),
                           (0, "pre", "norm")}  # fmt: skip
    for (layer, _, name), group in places.items():
        if name == "norm":
            assert group["errors"]["mxfp8"]["sqnr_db"] == "Infinity"
            continue
        tensors = [values[name, layer, iteration] for iteration in (0, 1)]
        assert group["records"] == (5 if (layer, name) == (0, "input") else 2)  # and what has no source
        for label in FORMATS.split(","):
            errors = group["errors"][label]
            assert errors["records"] == 2
            for metric, value in expected(tensors, label).items():
                assert errors[metric] == pytest.approx(value, rel=1e-9), (label, metric)
        sqnr = {label: errors["sqnr_db"] for label, errors in group["errors"].items()}
        assert group["best"] == max(sqnr, key=lambda label: sqnr[label])
    assert document["all"]["errors"]["hifp8"]["records"] == len(values) + 1


def test_what_has_no_high_precision_source_is_named_and_counted(
    capd: Capd, known: tuple[Path, Values]
) -> None:
    found = capd("compare", known[0], "--formats", "mxfp8", "--axis", "-2", "--json")

    assert found.code == 0
    reasons = {each["reason"].split(";")[0]: each["records"] for each in found.json["unmeasured"]}
    assert reasons == {
        "int64 is no high-precision source": 1,
        "float8_e4m3fn is no high-precision source": 2,
        "only its statistics were kept": 1,
        "mxfp8:axis=-2: axis of mxfp8 cannot be -2 for a tensor of shape (64,)": 1,
    }
    assert "5 records not measured: " in found.err


def test_a_sample_has_the_errors_of_the_records_it_reads_and_says_how_exact_they_are(
    capd: Capd, tmp_path: Path
) -> None:
    rng, writer, values = np.random.default_rng(3), StoreWriter(tmp_path), []
    for iteration in range(40):
        bits = bf16_bits(rng.normal(scale=1 + iteration, size=(32, 64)).astype(np.float32))
        values.append(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
        writer.put("run", linear_key(), bits, "bfloat16", Moment(iteration=iteration))
    writer.close()

    found = capd("compare", tmp_path, "--formats", "mxfp4", "--by", "none", "--sample", "20%", "--json")

    read = [values[place] for place in sorted(places_of(40, 0.2, 0))]
    document = found.json
    errors = document["all"]["errors"]["mxfp4"]
    assert (found.code, errors["records"], document["all"]["records"]) == (0, 8, 40)
    assert errors["sqnr_db"] == pytest.approx(expected(read, "mxfp4")["sqnr_db"], rel=1e-9)
    assert document["all"]["values"]["absmax"] == max(float(each.abs().max()) for each in values)
    assert document["sample"] == {
        "share": 0.2, "records": 8, "of_records": 40, "raw_bytes": 8 * 4096, "of_raw_bytes": 40 * 4096,
        "operands": 0,
        "sqnr_db_error": {"mxfp4": errors["sqnr_db_error"]},
    }  # fmt: skip
    whole = capd("compare", tmp_path, "--formats", "mxfp4", "--by", "none", "--json").json
    assert whole["sample"] is None
    assert abs(errors["sqnr_db"] - whole["all"]["errors"]["mxfp4"]["sqnr_db"]) < 4 * errors["sqnr_db_error"]
    table = capd("compare", tmp_path, "--formats", "mxfp4", "--by", "none", "--sample", "20%")
    assert "± dB" in table.out
    assert "8 of 40 records were read, 20 %" in table.err
    assert capd("compare", tmp_path, tmp_path, "--sample", "5%").code == 2
    assert capd("compare", tmp_path, "--sample", "5").code == 2


def test_both_axes_and_single_blocks_are_measured_when_asked(capd: Capd, known: tuple[Path, Values]) -> None:
    run, values = known

    found = capd(
        "compare",
        run,
        "--formats",
        "mxfp8,hifp8",
        "--axis",
        "both",
        "--per-block",
        "--tensor",
        "weight",
        "--json",
    )

    [group] = found.json["groups"]
    assert list(group["errors"]) == ["mxfp8", "mxfp8:axis=-2", "hifp8"]
    tensors = [values["weight", layer, iteration] for layer, iteration in product((0, 1), (0, 1))]
    for label, axis in (("mxfp8", -1), ("mxfp8:axis=-2", -2)):
        assert group["errors"][label]["mse"] == pytest.approx(
            expected(tensors, "mxfp8", axis=axis)["mse"], rel=1e-9
        )
        blocks = group["errors"][label]["blocks"]
        assert blocks["count"] == 4 * (48 * 3 if axis == -1 else 2 * 80)
        assert sum(blocks["sqnr_histogram"].values()) + blocks["exact"] == blocks["count"]
        assert sum(blocks["scales"].values()) == sum(blocks["scale_exponents"].values()) == blocks["count"]
        assert 20 < blocks["sqnr_db"]["0.5"] < 40
    assert group["errors"]["hifp8"]["blocks"] is None
    ranges = group["block_ranges"]
    assert {size: each["count"] for size, each in ranges.items()} == {"1x32": 576, "32x1": 640, "32x32": 24}
    assert 3 < group["values"]["kurtosis"] + 0.5 < 4
    table = capd("compare", run, "--formats", "mxfp8,hifp8", "--per-block", "--tensor", "weight")
    assert "SQNR in dB of single blocks" in table.out


def test_the_table_and_csv_say_what_the_json_says(capd: Capd, known: tuple[Path, Values]) -> None:
    args = ("compare", known[0], "--formats", "mxfp8,hifp8", "--by", "tensor_name")

    document, table, text = (capd(*args, *more) for more in (("--json",), (), ("--csv",)))

    rows = list(csv.DictReader(io.StringIO(text.out)))
    groups = {group["tensor_name"]: group for group in document.json["groups"]}
    assert len(rows) == 2 * len(groups)
    for row in rows:
        errors = groups[row["tensor_name"]]["errors"][row["format"]]
        assert row["sqnr_db"] == str(errors["sqnr_db"])
        assert row["best"] == str(row["format"] == groups[row["tensor_name"]]["best"]).lower()
    lines = table.out.splitlines()
    assert lines[0].split()[:3] == ["tensor_name", "format", "records"]
    assert len(lines) == 1 + len(rows)
    assert sum(line.endswith("best") for line in lines) == len(groups)


def test_workers_change_no_digit(capd: Capd, known: tuple[Path, Values]) -> None:
    one, many = (capd("compare", known[0], "--json", "--workers", workers) for workers in ("1", "4"))

    assert one.out == many.out


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--formats", ""), 2, "unknown format ''"),
        (("--formats", "mxfp9"), 2, "unknown format 'mxfp9'; known: bf16, fp16, fp8, mxfp8"),
        (("--formats", "mxfp8:e2m1"), 2, "mxfp8 has no option 'e2m1'"),
        (("--by", "colour"), 2, "--by 'colour' is no field; use some of quant_type"),
        (("--axis", "3"), 2, "--axis cannot be '3'; use one of -1, -2, both"),
        (("--json", "--csv"), 2, "--csv and --json are two formats"),
        (("--records",), 2, "--records means nothing for a comparison of one capture"),
        (("--tolerance", "0.1"), 2, "--tolerance means nothing"),
        (("--sweep-scale", "--formats", "mxfp8"), 2, "unknown element 'mxfp8'; --sweep-scale takes e4m3"),
        (("--sweep-scale", "--per-block"), 2, "--per-block means nothing for a comparison of --sweep-scale"),
        (("--tensor", "nothing"), 5, "matches the selection"),
        (("--tensor", "ids"), 5, "no record with a high-precision source"),
        (("--quant-type", "statistics", "--sweep-scale"), 5, "no finite value other than zero"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_can(
    capd: Capd, known: tuple[Path, Values], args: tuple[str, ...], code: int, said: str
) -> None:
    found = capd("compare", known[0], *args)

    assert (found.code, found.out) == (code, "")
    assert said in found.err


def test_a_damaged_record_in_the_middle_is_named_and_the_rest_is_measured(capd: Capd, tmp_path: Path) -> None:
    writer, rng = StoreWriter(tmp_path), np.random.default_rng(3)
    for iteration in range(5):
        values = rng.normal(size=(256, 600)).astype(np.float32)
        writer.put("run", linear_key(), values, "float32", Moment(iteration=iteration))
    writer.close()
    whole = capd("compare", tmp_path, "--formats", "mxfp8", "--json").json["all"]
    [shard] = (path for path in tmp_path.glob("run.zarr/**/data/c/**/*") if path.is_file())
    content = bytearray(shard.read_bytes())
    at = len(content) // 2
    content[at : at + 64] = bytes(64)
    shard.write_bytes(content)

    found = capd("compare", tmp_path, "--formats", "mxfp8", "--json")
    swept = capd("compare", tmp_path, "--sweep-scale", "--formats", "e4m3", "--json")

    assert (found.code, swept.code) == (4, 4)
    [skipped] = found.json["skipped"]
    assert skipped["name"].endswith("#2")
    assert f"skipped {skipped['name']}" in found.err
    assert (whole["errors"]["mxfp8"]["records"], found.json["all"]["errors"]["mxfp8"]["records"]) == (5, 4)
    assert swept.json["groups"][0]["records"] == 4


def test_a_directory_of_tensor_files_is_compared_in_place(capd: Capd, tmp_path: Path) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for number in range(2):
        path = tmp_path / "files" / SEED_NAME.replace("0001", f"000{number}")
        path.parent.mkdir(exist_ok=True)
        torch.save(seed_dictionary(x, tensor_name="input", iteration=number), path)
    (tmp_path / "files" / SEED_NAME.replace("0001", "0009")).write_bytes(b"not a tensor file")

    found = capd("compare", tmp_path / "files", "--formats", "mxfp4", "--json")

    assert found.code == 1
    assert len(found.json["skipped"]) == 1
    assert found.json["all"]["errors"]["mxfp4"]["mse"] == pytest.approx(
        expected([x], "mxfp4")["mse"], rel=1e-9
    )


def test_the_sweep_finds_the_best_scale_of_each_tensor(capd: Capd, known: tuple[Path, Values]) -> None:
    run, values = known

    found = capd("compare", run, "--sweep-scale", "--tensor", "grad_output", "--json")
    table = capd("compare", run, "--sweep-scale", "--tensor", "grad_output", "--formats", "e4m3")
    text = capd("compare", run, "--sweep-scale", "--tensor", "grad_output", "--csv")

    [group] = found.json["groups"]
    assert (group["records"], group["exact"], list(group["sweeps"])) == (4, True, ["e4m3", "e5m2", "e2m1"])
    x = torch.cat(
        [tensor.double().reshape(-1) for name, tensor in values.items() if name[0] == "grad_output"]
    )
    sweep = group["sweeps"]["e4m3"]
    assert sweep["max_align"] == math.floor(math.log2(x.abs().max())) - 7
    assert sweep["min_align"] == math.floor(math.log2(x[x != 0].abs().min() / 2**-6))
    assert [level["exponent"] for level in sweep["levels"]] == pytest.approx(
        np.linspace(sweep["max_align"], sweep["min_align"], 21)
    )
    [level] = [level for level in sweep["levels"] if level["recommended"]]
    assert level["exponent"] == sweep["recommended"]
    assert level["score"] == max(each["score"] for each in sweep["levels"])
    assert len(table.out.splitlines()) == 22
    assert len(text.out.splitlines()) == 1 + 3 * 21
    assert table.out.count("recommended") == 1


def test_help_needs_no_torch_and_no_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"
    assert "--first-divergence" in done.stdout


@pytest.mark.fault
@pytest.mark.parametrize(
    "args", [("--formats", "mxfp8,nvfp4,hifp8", "--axis", "both"), ("{run}", "--records")]
)
def test_memory_is_bounded_whatever_the_size_of_the_run(tmp_path: Path, args: tuple[str, ...]) -> None:
    """400 MiB of records; comparing them takes less than half of that on top of what a small run takes."""
    writer = StoreWriter(tmp_path)
    block = bf16_bits(np.random.default_rng(1).normal(size=(2048, 2560)).astype(np.float32))
    for number in range(40):
        writer.put("large", linear_key(layer=number % 3), block, "bfloat16", Moment(iteration=number))
    writer.put("small", linear_key(), block[:4], "bfloat16", Moment())
    writer.close()

    peaks = {}
    for name in ("small", "large"):
        code = (
            "import resource, sys\nfrom capd.cli.app import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
            "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        run = str(tmp_path / f"{name}.zarr")
        command = ["compare", run, *(arg.format(run=run) for arg in args), "--workers", "4", "--csv"]
        done = subprocess.run(
            [sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=110, check=True
        )
        peaks[name] = int(done.stderr.split()[-1]) << 10

    assert peaks["large"] - peaks["small"] < 200 << 20, peaks
