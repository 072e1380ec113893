"""`capd compare STORE` without --by: the verdict as table, JSON and CSV, and the sentences that its numbers give."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from capd_client.protocol.key import Key, Moment
from tests.kit.store.cli import Result, StoreWriter, bf16_bits, linear_key

Capd = Callable[..., Result]
SCALES = {"input": 1.0, "weight": 0.02, "grad_output": 1e-5}
SHAPES = {"input": (4, 16, 64), "weight": (32, 64), "grad_output": (4, 16, 32)}
FORMATS = "fp8,mxfp8,hifp8"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two modules of two iterations; gradients that hifp8 has few bits for."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(6)
    writer = StoreWriter(root)
    for name, layer, iteration in product(SCALES, (0, 1), (0, 1)):
        bits = bf16_bits(rng.normal(scale=SCALES[name] * (1 + 50 * (layer and iteration)), size=SHAPES[name]))
        operation = "backward" if name == "grad_output" else "forward"
        key = linear_key(layer=layer, tensor_name=name, operation=operation, module=f"m{layer}")
        writer.put("run", key, bits, "bfloat16", Moment(iteration=iteration))
    writer.close()
    return root / "run.zarr"


def test_the_table_the_sentences_and_the_worst_tensors_are_printed(capd: Capd, run: Path) -> None:
    found = capd("compare", run, "--formats", FORMATS)

    assert found.code == 0
    header, *lines = found.out.splitlines()
    assert header.split() == [
        "format",
        "bits",
        "activations",
        "weights",
        "gradients",
        "Y",
        "dX",
        "dW",
        "zero",
        "%",
        "sat.",
        "%",
    ]
    assert [line.split()[0] for line in lines[:3]] == FORMATS.split(",")
    assert [line.split()[1] for line in lines[:3]] == ["8", "8.25", "8"]
    assert sum(line.count("*") for line in lines[:3]) == 3
    assert "Y, dX, dW: products of quantised operands, of 4 of 4 calls of linear layers." in lines
    assert any(line.startswith("fp8 keeps ") and "at 8 bits a value; no other" in line for line in lines)
    assert any(
        line.startswith("hifp8 without a scale loses ") and " dB on gradients against " in line
        for line in lines
    )
    worst = lines[lines.index("The worst tensors, each in the best format of its role:") + 1 :]
    assert worst[0].split()[:3] == ["tensor", "format", "SQNR"]
    assert len(worst) == 1 + 6


def test_json_has_the_verdict_beside_the_groups(capd: Capd, run: Path) -> None:
    found = capd("compare", run, "--formats", FORMATS, "--json").json
    grouped = capd("compare", run, "--formats", FORMATS, "--by", "none", "--json").json

    assert [group["tensor_name"] for group in found["groups"]] == ["grad_output", "input", "weight"]
    verdict = found["verdict"]
    roles = {"activations": "input", "weights": "weight", "gradients": "grad_output"}
    groups = {group["tensor_name"]: group for group in found["groups"]}
    for one in verdict["formats"]:
        assert set(one["roles"]) == set(roles)
        for role, name in roles.items():
            errors = groups[name]["errors"][one["format"]]
            shared = {key: value for key, value in errors.items() if key != "blocks"}
            assert {key: one["roles"][role][key] for key in shared} == shared
        assert set(one["products"]) == {"Y", "dX", "dW"}
    of_role = {
        role: {one["format"]: one["roles"][role]["tenth_sqnr_db"] for one in verdict["formats"]}
        for role in roles
    }
    assert verdict["best"] == {
        role: max(levels, key=lambda each: levels[each]) for role, levels in of_role.items()
    }
    assert verdict["calls"] == {"found": 4, "measured": 4, "partial": 0, "left_out": 0}
    worst = [one["sqnr_db"] for one in verdict["worst"]]
    assert worst == sorted(worst)
    # With --by no product is measured; nothing else differs.
    assert grouped["verdict"] == {
        **verdict, "calls": None, "formats": [{**one, "products": {}} for one in verdict["formats"]],
    }  # fmt: skip


def test_csv_has_a_row_for_each_format_on_each_role_and_product(capd: Capd, run: Path) -> None:
    found = capd("compare", run, "--formats", FORMATS, "--csv")

    rows = list(csv.DictReader(io.StringIO(found.out)))
    assert len(rows) == 3 * 6
    assert [row["role"] for row in rows[:6]] == ["activations", "weights", "gradients", "Y", "dX", "dW"]
    verdict = capd("compare", run, "--formats", FORMATS, "--json").json["verdict"]
    for row in rows:
        [one] = [each for each in verdict["formats"] if each["format"] == row["format"]]
        errors = {**one["roles"], **one["products"]}[row["role"]]
        assert float(row["sqnr_db"]) == errors["sqnr_db"]
        assert row["best"] == str(verdict["best"].get(row["role"]) == row["format"]).lower()


def test_without_gradients_there_is_no_product_and_it_is_said(capd: Capd, run: Path) -> None:
    found = capd("compare", run, "--formats", "mxfp8", "--tensor", "input")

    assert found.out.splitlines()[0].split()[:4] == ["format", "bits", "activations", "zero"]
    assert "No weights or gradients were measured, so nothing is said about them." in found.out
    assert "linear layers" not in found.out


def test_runs_together_have_no_products(capd: Capd, run: Path) -> None:
    found = capd("compare", run.parent, "--all-runs", "--formats", "mxfp8", "--json").json
    two = StoreWriter(run.parent)
    two.put("two", linear_key(), bf16_bits(np.ones((4, 4))), "bfloat16", Moment())
    two.close()

    assert found["verdict"]["calls"] is not None
    assert (
        capd("compare", run.parent, "--all-runs", "--formats", "mxfp8", "--json").json["verdict"]["calls"]
        is None
    )


def test_formats_along_a_chosen_axis_say_why_they_have_no_products(capd: Capd, run: Path) -> None:
    found = capd("compare", run, "--formats", "mxfp8,hifp8", "--axis", "-2")

    assert "none in mxfp8:axis=-2, because its axis is chosen." in found.out


def test_records_with_inf_are_left_out_for_all_formats_and_it_is_said(capd: Capd, tmp_path: Path) -> None:
    writer, rng = StoreWriter(tmp_path), np.random.default_rng(1)
    for iteration in range(20):
        values = rng.normal(scale=1e-7, size=(16, 64)).astype(np.float32)
        if iteration == 3:
            values[0, 0] = np.inf
        key = linear_key(tensor_name="grad_output", operation="backward")
        writer.put("run", key, bf16_bits(values), "bfloat16", Moment(iteration=iteration))
    writer.close()

    found = capd("compare", tmp_path, "--formats", "mxfp8,hifp8", "--json").json["verdict"]

    assert found["best"] == {"gradients": "mxfp8"}
    assert found["statements"][0]["format"] == "mxfp8"
    said = "1 of 20 records hold Inf or NaN; they are left out of the verdict for all formats."
    assert said in [one["text"] for one in found["statements"]]


def test_a_sample_says_its_error_and_reads_no_part_of_files(capd: Capd, tmp_path: Path) -> None:
    writer, rng = StoreWriter(tmp_path), np.random.default_rng(2)
    for layer, iteration in product(range(4), range(8)):
        bits = bf16_bits(rng.normal(size=(16, 64)))
        writer.put("run", linear_key(layer=layer), bits, "bfloat16", Moment(iteration=iteration))
    writer.close()

    found = capd("compare", tmp_path, "--formats", "fp8,mxfp8", "--sample", "50%")

    assert re.search(r"fp8 keeps about \d+\.\d ± \d\.\d dB on nine of ten tensors of activations", found.out)
    assert re.search(r"^fp8 +8 +\d+\.\d ±\d\.\d", found.out, re.MULTILINE)
    assert "16 of 32 records were read, 50 %" in found.err
    assert capd("export", tmp_path, "--to", "pt", "-o", tmp_path / "pt").code == 0
    refused = capd("compare", tmp_path / "pt", "--sample", "50%")
    assert (refused.code, "capd import" in refused.err) == (2, True)


def test_tensors_without_a_module_are_told_by_their_layer(capd: Capd, tmp_path: Path) -> None:
    writer, rng = StoreWriter(tmp_path), np.random.default_rng(2)
    for layer in range(3):
        key = Key(quant_type="bf16", rank=0, layer=layer, layer_type="attention", tensor_name="query")
        writer.put("run", key, bf16_bits(rng.normal(size=(8, 32))), "bfloat16", Moment(iteration=0))
    writer.close()

    lines = capd("compare", tmp_path, "--formats", "mxfp8").out.splitlines()
    header, *worst = lines[lines.index("The worst tensors, each in the best format of its role:") + 1 :]

    assert header.split()[:2] == ["tensor", "layer"]
    assert {line.split()[1] for line in worst} == {"0", "1", "2"}


def test_no_name_of_a_store_reaches_the_terminal_raw(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    evil = linear_key(quant_type="a\x1b[31m", module="m\x1b[2J\n")
    for one in (evil, linear_key()):
        writer.put("run", one, bf16_bits(np.ones((4, 32))), "bfloat16", Moment(iteration=0))
    writer.close()

    for more in ((), ("--by", "module"), ("--by", "quant_type")):
        done = capd("compare", tmp_path, "--formats", "mxfp8", *more)
        assert (done.code, "\x1b" in done.out + done.err) == (0, False)
