"""`capd replay` on stores of known operands: the table, JSON, figure, and what is refused or left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capd.formats import qdq
from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, bf16_bits, linear_key

Capd = Callable[..., Result]
SHAPES = {"input": (4, 24, 64), "weight": (32, 64), "grad_output": (4, 24, 32)}


def _put(writer: StoreWriter, name: str, values: Any, layer: int | None = 0, **more: Any) -> None:
    operation = "backward" if name.startswith("grad") else "forward"
    key = linear_key(
        layer=layer, tensor_name=name, operation=operation, module=f"m{layer}", **more.pop("key", {})
    )
    writer.put("run", key, bf16_bits(values), "bfloat16", Moment(iteration=more.pop("iteration", 0)), **more)


def _values(rng: np.random.Generator, name: str) -> Any:
    return rng.normal(size=SHAPES[name]) * {"input": 1.0, "weight": 0.02, "grad_output": 1e-5}[name]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two modules of two iterations."""
    root, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(6)
    writer = StoreWriter(root)
    for name, layer, iteration in product(SHAPES, (0, 1), (0, 1)):
        _put(writer, name, _values(rng, name), layer, iteration=iteration)
    writer.close()
    return root / "run.zarr"


def _operands(run: Path, layer: int) -> dict[str, torch.Tensor]:
    from capd.store.read.store import open_store

    series = {one.key.tensor_name: one for one in open_store(run).series if one.key.module == f"m{layer}"}
    return {name: series[name].torch(0).flatten(0, -2) for name in SHAPES}


def test_the_numbers_are_those_of_the_captured_operands(capd: Capd, run: Path) -> None:
    found = capd("replay", run, "--recipe", "mxfp4,none", "--by", "layer,iteration", "--json")
    assert found.code == 0
    document = found.json
    group = next(one for one in document["groups"] if (one["layer"], one["iteration"]) == (1, 0))
    x, w, g = (_operands(run, 1)[name].float() for name in SHAPES)
    expected = {
        "y": (x, w.t(), qdq(x, "mxfp4") @ qdq(w, "mxfp4").t()),
        "dx": (g, w, qdq(g, "mxfp4") @ qdq(w, "mxfp4", axis=0)),
        "dw": (g.t(), x, qdq(g, "mxfp4", axis=0).t() @ qdq(x, "mxfp4", axis=0)),
    }
    for name, (a, b, quantised) in expected.items():
        exact = a.double() @ b.double()
        d = quantised.double() - exact
        numbers = group["recipes"]["mxfp4"][name]
        assert numbers["sqnr_db"] == pytest.approx(
            float(10 * (exact.square().sum() / d.square().sum()).log10()), abs=1e-3
        )
        assert numbers["alignment"] == pytest.approx(
            1 + float((exact * d).sum() / exact.square().sum()), abs=1e-5
        )
        assert numbers["reference"] == "float64"
        none = group["recipes"]["none"][name]
        assert (none["sqnr_db"], none["zeta"], none["alignment"]) == ("Infinity", 0.0, 1.0)
    assert document["calls"]["found"] == document["calls"]["replayed"] == 4
    assert document["all"]["mxfp4"]["y"]["calls"] == 4
    assert [one["layer"] for one in document["layers"]] == [0, 1]


def test_the_table_has_a_row_for_each_product(capd: Capd, run: Path) -> None:
    found = capd("replay", run, "--recipe", "mxfp8,mxfp4", "--blame", "--by", "module")
    assert found.code == 0
    header, *lines = found.out.splitlines()
    assert header.split()[:4] == ["module", "recipe", "product", "SQNR"]
    assert [line.split()[:3] for line in lines[:12]] == [
        [module, recipe, name]
        for module in ("m0", "m1")
        for recipe in ("mxfp8", "mxfp4")
        for name in ("Y", "dX", "dW")
    ]
    assert "4 calls of 4 replayed, with the operands of each rank." in lines


def test_blame_names_the_operands_of_each_product(capd: Capd, run: Path) -> None:
    products = capd("replay", run, "--recipe", "mxfp4", "--blame", "--json").json["all"]["mxfp4"]
    assert {name: [*one["blame"]] for name, one in products.items()} == {
        "y": ["x", "w", "cross", "mask"], "dx": ["g", "w", "cross", "mask"], "dw": ["g", "x", "cross", "mask"],
    }  # fmt: skip
    for one in products.values():
        assert sum(part["inner"] for part in one["blame"].values()) == pytest.approx(1, abs=1e-4)


def test_a_figure_and_json_are_written_once(capd: Capd, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, numbers = tmp_path / "x.png", tmp_path / "x.json"
    assert capd("replay", run, "--recipe", "mxfp8,mxfp4", "-o", figure).code == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert capd("replay", run, "--recipe", "mxfp8", "-o", numbers).code == 0
    assert json.loads(numbers.read_text())["recipes"] == [{"name": "mxfp8", "random": False}]
    refused = capd("replay", run, "--recipe", "mxfp8", "-o", numbers)
    assert (refused.code, "exists already" in refused.err) == (1, True)
    assert capd("replay", run, "--recipe", "mxfp8", "-o", tmp_path / "x.txt").code == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--recipe", "mxfp5"), "mxfp5"),
        (("--recipe", "mxfp8,mxfp8"), "second recipe"),
        (("--recipe", ","), "no recipe"),
        (("--recipe", "mxfp8", "--product", "y,dz"), "'dz' is no product; use y, dx, dw"),
        (("--recipe", "mxfp8", "--by", "tensor_name"), "'tensor_name' is no field of a call"),
        (("--recipe", "mxfp8", "--rows", "200"), "multiple"),
    ],
)
def test_bad_options_are_refused(capd: Capd, run: Path, args: tuple[str, ...], message: str) -> None:
    refused = capd("replay", run, *args)
    assert (refused.code, message in refused.err) == (2, True)


def test_some_tokens_are_taken_in_whole_blocks(capd: Capd, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    writer = StoreWriter(tmp_path)
    shapes = {"input": (1000, 16), "weight": (8, 16), "grad_output": (1000, 8)}
    values = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    # Rows 384 to 512 are one of the two blocks that are taken of seven.
    values["input"][400] = 0.0
    values["input"][400, :2] = 1.0, 0.06
    for name, each in values.items():
        _put(writer, name, each)
    writer.close()
    found = capd("replay", tmp_path / "run.zarr", "--recipe", "mxfp4", "--rows", "256", "--json").json
    assert found["calls"]["of_some_rows"] == 1
    y = found["all"]["mxfp4"]["y"]
    assert y["values"] == 256 * 8
    assert found["all"]["mxfp4"]["dw"]["values"] == 16 * 8
    assert y["worst"]["row"] in (*range(128), *range(384, 512))


def test_what_cannot_be_replayed_is_counted_by_reason(capd: Capd, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    writer = StoreWriter(tmp_path)
    for name in SHAPES:
        _put(writer, name, _values(rng, name), 0)
        fused = {"attributes": {"operands": "input before the norm"}} if name == "input" else {}
        _put(writer, name, _values(rng, name), 1, **fused)
        sliced = {"metadata": b'{"slice": {"take": "4", "of": [8, 24, 64]}}'} if name != "weight" else {}
        _put(writer, name, _values(rng, name), 2, **sliced)
    for name in ("input", "weight"):
        _put(writer, name, _values(rng, name), 3)
        _put(writer, name, rng.normal(size=(32, 60) if name == "weight" else (8, 64)), 4)
    writer.close()
    found = capd("replay", tmp_path / "run.zarr", "--recipe", "mxfp8", "--json")
    assert found.code == 0
    assert {one["reason"]: one["calls"] for one in found.json["calls"]["left_out"]} == {
        "Y: input: a fused layer captured its input before the norm": 1,
        "dW: input: a fused layer captured its input before the norm": 1,
        "dW: slices of tokens were captured, so dW would be another sum": 1,
        "dX: grad_output was not captured": 2,
        "dW: grad_output was not captured": 2,
        "Y: shapes that do not multiply": 1,
    }
    assert "Y: shapes that do not multiply" in found.err
    assert (
        found.json["calls"]["found"],
        found.json["calls"]["replayed"],
        found.json["calls"]["partial"],
    ) == (5, 4, 1)


def test_a_run_without_a_linear_call_has_nothing_to_replay(capd: Capd, tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    _put(writer, "weight", np.ones((4, 4)))
    writer.close()
    refused = capd("replay", tmp_path / "run.zarr", "--recipe", "mxfp8")
    assert (refused.code, "nothing to replay" in refused.err) == (5, True)


def test_a_report_has_the_replay_of_the_recipes_that_it_names(capd: Capd, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "all"
    done = capd("report", run, "-o", out, "--formats", "none", "--recipe", "mxfp4,none", "--json")
    assert done.code in (0, 2)  # 2: matplotlib is missing
    plain = json.loads((out / "global_statistics.json").read_text())["replay"]
    alone = capd(
        "replay", run, "--recipe", "mxfp4,none", "--by", "quant_type,rank,layer,module", "--json"
    ).json
    assert plain == alone
    page = (out / "report.html").read_text(encoding="utf-8")
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])["replay"]
    assert [one["module"] for one in data["groups"]] == ["m0", "m1"]
    assert data["all"]["none"]["y"]["sqnr_db"] == "Infinity"
    assert data["all"]["mxfp4"]["dw"]["sqnr_db"] == pytest.approx(
        plain["all"]["mxfp4"]["dw"]["sqnr_db"], rel=1e-3
    )
    assert capd("report", run, "-o", tmp_path / "x.html", "--quick", "--recipe", "mxfp4").code == 2
    assert capd("report", run, run, "-o", tmp_path / "x.html", "--recipe", "mxfp4").code == 2


@pytest.mark.parametrize("layout", ["expert,out,in", "expert,in,out"])
def test_the_rows_of_each_expert_are_a_product_of_their_own(capd: Capd, tmp_path: Path, layout: str) -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(3, 8, 32)) * np.array([1.0, 50.0, 1.0])[:, None, None]
    values = {"input": rng.normal(size=(20, 32)), "weight": weight, "grad_output": rng.normal(size=(20, 8))}
    if layout.endswith("in,out"):
        values["weight"] = weight.transpose(0, 2, 1)
    writer = StoreWriter(tmp_path)
    grouped = {"component": "grouped_linear"}
    for name, each in values.items():
        _put(
            writer, name, each, key=grouped, attributes={"weight_layout": layout} if name == "weight" else {}
        )
    # Expert 1 has no rows.
    offsets = np.array([12, 12, 20], np.int32)
    writer.put(
        "run",
        linear_key(tensor_name="offsets", module="m0", **grouped),
        offsets,
        "int32",
        Moment(iteration=0),
    )
    writer.close()
    found = capd("replay", tmp_path / "run.zarr", "--recipe", "mxfp4", "--by", "module", "--json").json
    assert [one["module"] for one in found["groups"]] == ["m0.0", "m0.2"]
    assert [one["recipes"]["mxfp4"]["y"]["values"] for one in found["groups"]] == [12 * 8, 8 * 8]
    one = StoreWriter(tmp_path / "alone")
    for name, each in (
        ("input", values["input"][12:]),
        ("weight", weight[2]),
        ("grad_output", values["grad_output"][12:]),
    ):
        _put(one, name, each)
    one.close()
    alone = capd("replay", tmp_path / "alone/run.zarr", "--recipe", "mxfp4", "--json").json["all"]["mxfp4"]
    last = next(one for one in found["groups"] if one["module"] == "m0.2")["recipes"]["mxfp4"]
    assert {name: each["sqnr_db"] for name, each in last.items()} == {
        name: pytest.approx(each["sqnr_db"], abs=1e-9) for name, each in alone.items()
    }
