"""`capd check` on stores of known operands: the table, JSON, exit codes, and what cannot be compared."""

from __future__ import annotations

import json
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
    reason = "Y: output: parts of it are missing: tp 1 (rank 1 on node node0)"
    assert reason in capd("check", missing).err


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


def put_attention(
    root: Path,
    told: dict[str, Any],
    *,
    scale: float,
    factor: float = 1.0,
    layout: Any = "bhsd",
    keys: int = 9,
) -> Path:
    """Causal attention of two heads, [batch, heads, positions, size], whose output has the positions first."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 2, 9, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    k, v = k[:, :, :keys], v[:, :, :keys]
    mask = torch.ones(9, keys, dtype=torch.bool).triu(1)
    weights = (q @ k.transpose(-1, -2) * scale).masked_fill(mask, -torch.inf).softmax(-1)
    output = (factor * weights @ v).transpose(1, 2)
    attributes = {"layout": layout, "output_layout": "bshd"}
    facts = {
        "attn_mask_type": "AttnMaskType.causal",
        "attention_dropout": 0.0,
        "softmax_scale": scale,
        **told,
    }
    writer = StoreWriter(root)
    for name, value in {"query": q, "key": k, "value": v, "output": output}.items():
        key = linear_key(layer=0, tensor_name=name, module="attn", component="FA", layer_type="attention")
        metadata = json.dumps(facts).encode()
        array = value.float().contiguous().numpy()
        writer.put("run", key, array, "float32", Moment(), attributes=attributes, metadata=metadata)
    writer.close()
    return root / "run.zarr"


@pytest.mark.parametrize("scale", [8**-0.5, 0.7])
def test_attention_whose_output_has_another_order_is_judged(capd: Capd, tmp_path: Path, scale: float) -> None:
    assert capd("check", put_attention(tmp_path / "sound", {}, scale=scale)).code == 0
    [wrong] = capd("check", put_attention(tmp_path, {}, scale=scale, factor=1.05), "--json").json["first"]
    assert (wrong["product"], wrong["factor"]["alpha"]) == ("o", pytest.approx(1.05, abs=1e-4))


def test_attention_with_dropout_is_counted(capd: Capd, tmp_path: Path) -> None:
    found = capd("check", put_attention(tmp_path, {"attention_dropout": 0.1}, scale=0.3))
    assert (found.code, "O: dropout takes weights away at random" in found.err) == (5, True)


def test_queries_without_a_key_are_counted(capd: Capd, tmp_path: Path) -> None:
    told = {"attn_mask_type": "causal_bottom_right"}
    found = capd("check", put_attention(tmp_path, told, scale=0.3, keys=5))
    assert (found.code, "O: its first queries see no key" in found.err) == (5, True)
    assert capd("check", put_attention(tmp_path / "causal", {}, scale=0.3, keys=5)).code == 0


@pytest.mark.parametrize("layout", ["dhsb", ["b", "h"], None])
def test_attention_of_unknown_axes_is_counted(capd: Capd, tmp_path: Path, layout: Any) -> None:
    found = capd("check", put_attention(tmp_path, {}, scale=0.3, layout=layout))
    assert (found.code, "O: the order of the axes is not known" in found.err) == (5, True)


@pytest.mark.parametrize("told", [10**400, True, "0.3"])
def test_a_scale_that_is_no_number_is_unknown(capd: Capd, tmp_path: Path, told: Any) -> None:
    found = capd("check", put_attention(tmp_path, {"softmax_scale": told}, scale=0.7))
    assert (found.code, "O: its mask, scale or dropout is not recorded" in found.err) == (5, True)


def test_one_row_does_not_tell_an_error_from_a_bias_and_two_do(capd: Capd, tmp_path: Path) -> None:
    bias = np.linspace(-3, 3, 48)
    for rows, factor, code in ((1, 1, 5), (2, 1, 0), (2, 1.2, 1)):
        made = tensors()
        x = made["input"][:rows]
        y = x @ made["weight"].T
        y[-1] *= factor
        run = put(tmp_path / f"{rows}{factor}", {"input": x, "weight": made["weight"], "output": y + bias})
        found = capd("check", run)
        assert found.code == code
        assert ("one row does not tell an error from a bias" in found.err) == (rows == 1)


def test_a_gradient_that_may_be_of_several_micro_batches_is_that_of_all_or_is_counted(
    capd: Capd, tmp_path: Path
) -> None:
    """Two micro-batches with output gradients, of which the first alone has a gradient of the weight."""
    batches = [tensors(seed) for seed in range(2)]
    total = sum(one["grad_weight"] for one in batches)
    for name, without, factor, code in (("sum", "", 1, 0), ("wrong", "", 1.5, 1), ("lacks", "input", 1, 5)):
        writer = StoreWriter(tmp_path / name)
        for number, values in enumerate(batches):
            made = {"input": values["input"], "grad_output": values["grad_output"]}
            made = {**made, "grad_weight": factor * total} if number == 0 else made
            for each in made.keys() - ({without} if number else set()):
                operation = "backward" if each.startswith("grad") else "forward"
                key = linear_key(layer=0, tensor_name=each, operation=operation, module="m0")
                array = bf16_bits(_rounded(made[each]))
                writer.put("run", key, array, "bfloat16", Moment(iteration=0, micro_batch=number))
        writer.close()
        found = capd("check", tmp_path / name / "run.zarr")
        assert found.code == code, name
    reason = "dW: it may be the sum over several micro-batches: input was not captured"
    assert reason in found.err
