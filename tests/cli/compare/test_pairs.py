"""`capd compare A B` and `--between`: what is matched, what differs, where it first does, and what is left out."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, bf16_bits, linear_key
from tests.kit.store.pt_files import SEED_NAME, seed_dictionary

Capd = Callable[..., Result]
ITERATIONS, LAYERS = 3, 2
Change = Callable[[int, int, str, np.ndarray], np.ndarray]


def unchanged(iteration: int, layer: int, name: str, values: np.ndarray) -> np.ndarray:
    return values


def diverging(iteration: int, layer: int, name: str, values: np.ndarray) -> np.ndarray:
    """From the backward of layer 1 in iteration 1 on; that of layer 0, captured after it, and all that follows."""
    late = (iteration, name == "grad_output", -layer) >= (1, True, -1)
    return values + 0.5 if late else values


def write_run(root: Path, run_id: str, change: Change = unchanged, rank: int = 0, **key: Any) -> Path:
    """Forwards of layers 0 and 1, backwards of layers 1 and 0, in each iteration; times that only grow."""
    writer, clock = StoreWriter(root), 1_000_000 * (1 + rank)
    for iteration in range(ITERATIONS):
        rng = np.random.default_rng(iteration)
        steps = [(layer, "output") for layer in range(LAYERS)]
        steps += [(layer, "grad_output") for layer in reversed(range(LAYERS))]
        for layer, name in steps:
            values = change(iteration, layer, name, rng.normal(size=(8, 32)).astype(np.float32))
            clock += 1
            one = linear_key(layer=layer, tensor_name=name, rank=rank, module=f"m.{layer}", **key)
            writer.put(run_id, one, bf16_bits(values), "bfloat16", Moment(iteration=iteration, time_ns=clock))
    writer.close()
    return root / f"{run_id}.zarr"


def test_runs_that_agree_are_identical_record_by_record(capd: Capd, tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", "one"), write_run(tmp_path / "b", "two")

    found = capd("compare", a, b, "--json")

    document = found.json
    assert found.code == 0
    assert (document["pairs"], document["compared"], document["different"]) == (12, 12, 0)
    assert (document["first_divergence"], document["complete"]) == (None, True)
    assert document["all"]["identical"] == 12
    assert document["all"]["equal"] == document["all"]["elements"] == 12 * 256
    assert [(group["tensor_name"], group["pairs"]) for group in document["groups"]] == [
        ("grad_output", 6),
        ("output", 6),
    ]
    assert "12 of 12 pairs compared: no bit differs" in capd("compare", a, b).out


def test_the_first_divergence_is_the_first_in_order_of_execution(capd: Capd, tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", "one"), write_run(tmp_path / "b", "two", diverging)

    found = capd("compare", a, b, "--first-divergence", "--json")
    whole = capd("compare", a, b, "--records", "--json")
    text = capd("compare", a, b, "--first-divergence")

    first = found.json["first_divergence"]
    assert (first["iteration"], first["layer"], first["tensor_name"]) == (1, 1, "grad_output")
    assert first == whole.json["first_divergence"]
    assert first["max_abs"] == pytest.approx(0.5, abs=0.02)
    assert (found.json["complete"], found.json["compared"], found.json["different"]) == (False, 7, 1)
    assert whole.json["different"] == 2 + 4
    order = [(row["iteration"], row["layer"], row["tensor_name"]) for row in whole.json["records"]]
    expected = [(0, "output"), (1, "output"), (1, "grad_output"), (0, "grad_output")]
    assert order == [(iteration, *step) for iteration in range(ITERATIONS) for step in expected]
    assert "first divergence: iteration 1, micro-batch 0, rank 0: bf16/rank0/layer1" in text.out
    assert found.code == whole.code == text.code == 0


def test_rows_are_what_numpy_finds_and_csv_has_them_all(capd: Capd, tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", "one"), write_run(tmp_path / "b", "two", diverging)

    rows = list(csv.DictReader(io.StringIO(capd("compare", a, b, "--records", "--csv").out)))
    table = capd("compare", a, b, "--records").out.splitlines()
    groups = list(csv.DictReader(io.StringIO(capd("compare", a, b, "--by", "iteration", "--csv").out)))

    rng = np.random.default_rng(1)
    values = [rng.normal(size=(8, 32)).astype(np.float32) for _ in range(4)]

    def stored(array: np.ndarray) -> np.ndarray:
        return (bf16_bits(array).astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    x, y = stored(values[2]), stored(values[2] + 0.5)  # the third of iteration 1: grad_output of layer 1
    assert [row["different"] for row in rows[4:8]] == ["false", "false", "true", "true"]
    assert float(rows[6]["max_abs"]) == np.abs(y - x).max()
    assert float(rows[6]["sqnr_db"]) == pytest.approx(10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()))
    assert int(rows[6]["equal"]) == (x == y).sum()
    assert len(table) == 1 + 12 + 1 + 2  # header, rows, an empty line, summary
    assert [(row["iteration"], row["pairs"], row["identical"]) for row in groups] == [
        ("0", "4", "4"), ("1", "4", "2"), ("2", "4", "0"),
    ]  # fmt: skip


def test_a_tolerance_passes_what_is_near(capd: Capd, tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", "one")
    b = write_run(tmp_path / "b", "two", lambda iteration, layer, name, values: values * 1.01)

    near, far = (capd("compare", a, b, "--tolerance", share, "--json").json for share in ("0.05", "0.001"))

    assert (near["different"], near["first_divergence"]) == (0, None)
    assert far["different"] == 12


def test_two_quant_types_of_one_run_are_matched_without_them(capd: Capd, tmp_path: Path) -> None:
    write_run(tmp_path, "one", quant_type="bf16")
    write_run(tmp_path, "one", diverging, quant_type="mxfp8")

    found = capd("compare", tmp_path, "--between", "quant_type=bf16,mxfp8", "--json").json

    assert (found["pairs"], found["different"], found["ignored"]) == (12, 6, ["quant_type"])
    assert found["left"]["source"].endswith("one.zarr (quant_type=bf16)")
    assert found["first_divergence"]["right"].startswith("mxfp8/")


def test_two_ranks_of_one_run_are_matched_without_them(capd: Capd, tmp_path: Path) -> None:
    write_run(tmp_path, "one", rank=0)
    write_run(tmp_path, "one", diverging, rank=1)

    found = capd("compare", tmp_path, "--between", "rank=0,1", "--layer", "1", "--json").json

    assert (found["pairs"], found["different"], found["first_divergence"]["layer"]) == (6, 3, 1)


def test_two_runs_of_one_quant_type_each_are_matched_without_it_and_that_is_said(
    capd: Capd, tmp_path: Path
) -> None:
    a, b = write_run(tmp_path / "a", "one"), write_run(tmp_path / "b", "two", quant_type="hifp8")

    found = capd("compare", a, b, "--json")
    asked = capd("compare", a, b, "--ignore", "quant_type", "--json")
    strict = capd("compare", a, b, "--ignore", "stack", "--json")

    assert (found.code, found.json["compared"], found.json["ignored"]) == (0, 12, ["quant_type"])
    assert "the quant types differ, bf16 and hifp8" in found.err
    assert asked.json["compared"] == 12
    assert (strict.code, strict.out) == (5, "")
    assert "share no record: 12 and 12 records; they differ in quant_type (bf16 against hifp8)" in strict.err


def test_runs_that_share_nothing_say_in_what_they_differ(capd: Capd, tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", "one", component="FA"), write_run(tmp_path / "b", "two", rank=3)

    found = capd("compare", a, b)

    assert (found.code, found.out) == (5, "")
    assert (
        "they differ in rank (0 against 3), component (FA against linear), and --ignore matches without these fields"
        in found.err
    )


def test_what_has_no_counterpart_or_another_shape_is_named_and_counted(capd: Capd, tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", "one"), write_run(tmp_path / "b", "two")
    for root, run_id, shape, dtype in (("a", "one", (2, 4), "float32"), ("b", "two", (4, 2), "float32")):
        writer = StoreWriter(tmp_path / root)
        writer.put(run_id, linear_key(tensor_name="shape"), np.ones(shape, np.float32), dtype, Moment())
        writer.put(run_id, linear_key(tensor_name=f"only {root}"), np.ones(3, np.float32), dtype, Moment())
        bits = np.ones(3, np.float32) if root == "a" else np.ones(3, np.float64)
        writer.put(run_id, linear_key(tensor_name="dtype"), bits, str(bits.dtype), Moment())
        writer.put(
            run_id, linear_key(tensor_name="kept"), np.ones(3, np.float32), dtype, Moment(), payload=False
        )
        writer.close()

    found = capd("compare", a, b, "--json")

    document = found.json
    assert (found.code, document["compared"], document["without_elements"]) == (0, 12, 2)
    assert sorted(each["reason"] for each in document["mismatched"]) == [
        "dtype float32 against float64", "shape [2, 4] against [4, 2]",
    ]  # fmt: skip
    assert (document["only_left"]["count"], document["only_right"]["count"]) == (1, 1)
    assert "only" in document["only_left"]["names"][0]
    assert "2 pairs not compared, of different dtypes or shapes: " in found.err
    assert f"1 record in {a} alone: " in found.err
    assert "2 records are statistics alone" in found.err
    nothing = capd("compare", a, b, "--tensor", "shape")
    assert (nothing.code, nothing.out) == (5, "")
    assert "none of 1 pairs can be compared: shape [2, 4] against [4, 2]" in nothing.err


def test_a_damaged_record_is_named_and_the_others_are_compared(capd: Capd, tmp_path: Path) -> None:
    for name in ("a", "b"):
        writer, rng = StoreWriter(tmp_path / name), np.random.default_rng(0)
        for iteration in range(5):
            values = rng.normal(size=(256, 600)).astype(np.float32)
            writer.put("run", linear_key(), values, "float32", Moment(iteration=iteration, time_ns=iteration))
        writer.close()
    [shard] = (path for path in tmp_path.glob("b/run.zarr/**/data/c/**/*") if path.is_file())
    content = bytearray(shard.read_bytes())
    at = len(content) // 2
    content[at : at + 64] = bytes(64)
    shard.write_bytes(content)

    found = capd("compare", tmp_path / "a", tmp_path / "b", "--json")

    assert found.code == 4
    assert (found.json["compared"], found.json["different"]) == (4, 0)
    [skipped] = found.json["skipped"]
    assert skipped["name"].startswith(str(tmp_path / "b"))
    assert skipped["name"].endswith("#2")


def test_directories_of_tensor_files_are_matched_with_runs_and_with_each_other(
    capd: Capd, tmp_path: Path
) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for root, change in (("one", 0.0), ("two", 1.0)):
        (tmp_path / root).mkdir()
        for number in range(3):
            path = tmp_path / root / SEED_NAME.replace("0001", f"000{number}")
            torch.save(
                seed_dictionary(x + change * (number == 2), iteration=number, tensor_name="input"), path
            )
    (tmp_path / "two" / SEED_NAME.replace("0001", "0009")).write_bytes(b"no tensor file")
    assert capd("import", tmp_path / "one", "--store", tmp_path / "runs", "--run-id", "old").code == 0

    files = capd("compare", tmp_path / "one", tmp_path / "two", "--json")
    mixed = capd("compare", tmp_path / "runs" / "old.zarr", tmp_path / "one", "--json")

    assert files.code == 1
    assert (files.json["compared"], files.json["different"]) == (3, 1)
    assert files.json["first_divergence"]["iteration"] == 2
    assert len(files.json["skipped"]) == 1
    assert (mixed.code, mixed.json["compared"], mixed.json["different"]) == (0, 3, 0), mixed.err


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--between", "rank=0"), 2, "is not FIELD=A,B with two values"),
        (("--between", "rank=0,0"), 2, "is not FIELD=A,B with two values"),
        (("--between", "rank=0,x"), 2, "rank cannot be 'x'"),
        (("--between", "colour=a,b"), 2, "'colour' is no field of a key"),
        (("--between", "rank=0,7"), 5, "no tensor in"),
        (
            ("--between", "rank=0,1", "--formats", "mxfp8"),
            2,
            "--formats means nothing for a comparison of two captures",
        ),
        (("--between", "rank=0,1", "--sweep-scale"), 2, "--sweep-scale means nothing"),
        (("--between", "rank=0,1", "--ignore", "colour"), 2, "--ignore 'colour' is no field"),
        (("OTHER", "--between", "rank=0,1"), 2, "leave OTHER out"),
        (("OTHER", "--all-runs"), 2, "--all-runs means nothing"),
        (("missing",), 1, "no run in"),
    ],
)
def test_what_cannot_be_matched_is_refused(
    capd: Capd, tmp_path: Path, args: tuple[str, ...], code: int, said: str
) -> None:
    run = write_run(tmp_path, "one")

    found = capd("compare", run, *(str(run) if arg == "OTHER" else arg for arg in args))

    assert (found.code, found.out) == (code, "")
    assert said in found.err
