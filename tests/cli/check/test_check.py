"""`capd check` on stores of known operands: the table, JSON, exit codes, and what cannot be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from tests.kit.store.cli import Result, StoreWriter, bf16_bits, linear_key
from tests.kit.store.damaging import flip
from tests.kit.store.parts import linear, placed, put_parts

Capd = Callable[..., Result]
NAMES = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")


def tensors(seed: int = 0, **changed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    drawn = {"input": (40, 64), "weight": (48, 64), "grad_output": (40, 48)}
    x, w, g = (_rounded(rng.normal(size=shape)) for shape in drawn.values())
    made = {
        "input": x,
        "weight": w,
        "output": x @ w.T,
        "grad_output": g,
        "grad_input": g @ w,
        "grad_weight": g.T @ x,
    }
    return {name: changed.get(name, lambda value: value)(value) for name, value in made.items()}


def _rounded(values: Any) -> Any:
    return torch.from_numpy(values).bfloat16().double().numpy()


def put(root: Path, values: dict[str, Any], **more: Any) -> Path:
    writer = StoreWriter(root)
    for name, value in values.items():
        operation = "backward" if name.startswith("grad") else "forward"
        key = linear_key(layer=0, tensor_name=name, operation=operation, module="m0")
        writer.put("run", key, bf16_bits(_rounded(value)), "bfloat16", Moment(), **more)
    writer.close()
    return root / "run.zarr"


def test_sound_products_hold(capd: Capd, tmp_path: Path) -> None:
    run = put(tmp_path, tensors())
    found = capd("check", run)
    assert (found.code, found.err) == (0, "")
    assert [line.split()[:3] for line in found.out.splitlines()[1:4]] == [
        ["Y", "1", "0"], ["dX", "1", "0"], ["dW", "1", "0"],
    ]  # fmt: skip
    assert "All are within the rounding of their dtype." in found.out
    document = capd("check", run, "--by", "module", "--json").json
    assert (document["checked"], document["beyond"], document["operands"]) == (3, 0, "rank")
    assert [group["module"] for group in document["groups"]] == ["m0"]


def test_a_wrong_product_is_named_with_its_factor(capd: Capd, tmp_path: Path) -> None:
    run = put(tmp_path, tensors(grad_input=lambda value: 2 * value), attributes={"tp_size": 2, "tp_rank": 0})
    found = capd("check", run)
    assert found.code == 1
    assert "dX of m0, rank 0, iteration 0" in found.out
    assert "equals tp_size" in found.out
    [first] = capd("check", run, "--json").json["first"]
    assert (first["product"], first["rows"]["beyond"], first["factor"]["is"]) == ("dx", 40, ["tp_size"])
    assert capd("check", run, "--limit", "1000eps", "--row-limit", "1000").code == 0


def test_parts_of_two_ranks_make_a_product(capd: Capd, tmp_path: Path) -> None:
    """Row-parallel: input and weight are cut along the contraction, and the products of the ranks are added up."""
    x, w = (tensors()[name] for name in ("input", "weight"))
    parts = []
    for rank, (one, other) in enumerate(zip(np.split(x, 2, 1), np.split(w, 2, 1), strict=True)):
        values = {"input": one, "weight": other, "output": one @ other.T}
        for (name, value), placement in zip(values.items(), ("S(-1)", "S(1)", "P(sum)"), strict=True):
            key = linear(name, rank, quant_type="bf16")
            parts.append((key, bf16_bits(_rounded(value)), placed("tp", placement, rank, 2, batch_dims=[])))
    run = put_parts(tmp_path, parts, sessions={0: 2, 1: 2})
    found = capd("check", run, "--json").json
    assert (found["operands"], found["checked"], found["beyond"]) == ("logical", 1, 0)
    assert capd("check", run, "--rank", "1", "--json").json["checked"] == 1
    missing = put_parts(tmp_path / "missing", parts[:-1], sessions={0: 2, 1: 2})
    assert "parts of it are missing" in capd("check", missing).err


@pytest.mark.parametrize(
    ("without", "attributes", "reason"),
    [
        ("input", {}, "input was not captured"),
        ("", {"operands": "input before the norm"}, "input before the norm"),
        ("", {"tensor_class": "QTensor"}, "part of a quantised tensor"),
        ("", {"emulation": "no such recipe"}, "recipe of the emulation is not known"),
        ("", {"emulation": "/etc/passwd.toml"}, "recipe of the emulation is not known"),
        ("", {"tp_placement": "S(0)"}, "check all ranks together"),
        ("", {"tp_placement": ["x"], "operands": 7}, "not as multiplied"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_counted(
    capd: Capd, tmp_path: Path, without: str, attributes: dict[str, Any], reason: str
) -> None:
    values = {name: value for name, value in tensors().items() if name != without}
    run = put(
        tmp_path,
        {name: values[name] for name in values if not name.startswith("grad")},
        attributes=attributes,
    )
    found = capd("check", run)
    assert (found.code, found.out) == (5, "")
    assert reason in found.err


def test_shapes_that_do_not_multiply_are_counted(capd: Capd, tmp_path: Path) -> None:
    run = put(tmp_path, tensors(weight=lambda value: value[:, :-1]))
    found = capd("check", run, "--json")
    assert found.code == 0
    assert {one["reason"] for one in found.json["not_comparable"]} == {
        "Y: shapes that do not multiply", "dX: shapes that do not multiply"
    }  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [("--limit", "0eps"), ("--limit", "nan"), ("--row-limit", "-1"), ("--by", "colour"), ("--sample", "x")],
)
def test_bad_options_are_refused(capd: Capd, tmp_path: Path, args: tuple[str, ...]) -> None:
    assert capd("check", put(tmp_path, tensors()), *args).code == 2


def test_a_damaged_record_is_named_and_the_rest_is_checked(capd: Capd, tmp_path: Path) -> None:
    run = put(tmp_path, tensors())
    [series] = [one for one in open_store(run).series if one.key.tensor_name == "grad_input"]
    files = [path for path in (run / series.path).rglob("*") if path.is_file()]
    flip(max(files, key=lambda path: path.stat().st_size), 1000)
    found = capd("check", run)
    assert (found.code, "skipped" in found.err) == (4, True)
    assert "2 products of 1 call checked" in found.out
