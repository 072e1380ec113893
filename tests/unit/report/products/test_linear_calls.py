"""The calls of linear layers: which records belong together, which are measured, and what is left out and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from capd.analyze.format_choice import choices
from capd.analyze.verdict.products import Operands, product_errors
from capd.errors import DamagedRecord
from capd.io.items import Item, Loaded
from capd.report.gather import GatheredRecords, gather
from capd.report.products import product_errors as product_measurement
from capd.report.products.linear_calls import LinearCalls
from capd.report.products.product_errors import MOST_CALLS, ProductErrors
from capd_client.protocol.key import Key, Moment

FORMATS = choices("mxfp8,hifp8")
TOKENS, INPUTS, OUTPUTS = (2, 8), 32, 16
Read = Callable[[], NDArray[np.generic]]


def item(
    name: str, values: NDArray[np.float32], *, dtype: str = "float32", read: Read | None = None, **more: Any
) -> Item:
    moment = Moment(**{field: more.pop(field) for field in Moment.__struct_fields__ if field in more})
    attributes, metadata = more.pop("attributes", {}), more.pop("metadata", {})
    operation = "backward" if name.startswith("grad_") else "forward"
    fields = {
        "rank": 0,
        "module": "fc",
        "layer_type": "linear",
        "component": "linear",
        "operation": operation,
        **more,
    }
    key = Key(quant_type="bf16", tensor_name=name, **fields)
    read = read or (lambda: values)
    loaded = Loaded(key, moment, dtype, values.nbytes, None, read, attributes, values.shape, metadata)
    return Item(f"{key.module}/{name}#0", values.nbytes, lambda: loaded, read)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, W, DY = normal(1, *TOKENS, INPUTS), normal(2, OUTPUTS, INPUTS), normal(3, *TOKENS, OUTPUTS)


def measured(*items: Item) -> ProductErrors:
    gathered = GatheredRecords(calls=LinearCalls())
    for _ in gather(items, gathered, threads=2, choices=FORMATS):
        pass
    assert gathered.products is not None
    return gathered.products


def expected(
    x: NDArray[np.float32], w: NDArray[np.float32], dy: NDArray[np.float32]
) -> dict[str, dict[str, float | None]]:
    flat = [torch.from_numpy(one.reshape(-1, one.shape[-1])) for one in (x, w, dy)]
    found = product_errors(Operands(*flat), FORMATS)
    return {label: {name: one.sqnr_db for name, one in errors.items()} for label, errors in found.items()}


def levels(found: ProductErrors) -> dict[str, dict[str, float | None]]:
    return {
        choice.label: {name: one.errors.sqnr_db for name, one in found.of(choice.label).items()}
        for choice in FORMATS
        if found.of(choice.label)
    }


def test_batch_dimensions_are_rows() -> None:
    found = measured(item("input", X), item("weight", W), item("grad_output", DY))

    assert (found.calls, found.measured, found.left_out) == (1, 1, 0)
    assert levels(found) == expected(X, W, DY)


def test_the_weight_of_conv1d_is_stored_the_other_way_round() -> None:
    stored = np.ascontiguousarray(W.T)
    found = measured(
        item("input", X),
        item("weight", stored, attributes={"weight_layout": "in_out"}),
        item("grad_output", DY),
    )

    assert levels(found) == expected(X, W, DY)


def test_a_weight_of_an_iteration_is_that_of_all_its_calls() -> None:
    calls = [
        item(name, values, iteration=iteration, micro_batch=micro_batch)
        for iteration in (0, 1)
        for micro_batch in (0, 1, 2)
        for name, values in (("input", X), ("grad_output", DY))
    ]

    found = measured(*calls, item("weight", W, iteration=1, micro_batch=1))

    assert (found.calls, found.measured) == (3, 3)
    assert levels(found) == expected(X, W, DY)


@pytest.mark.parametrize(
    "changes",
    [{"module": "other"}, {"layer": 3}, {"rank": 1}, {"iteration": 1}, {"micro_batch": 1}, {"call": 1}],
    ids=str,
)
def test_records_of_other_calls_are_no_operands(changes: dict[str, Any]) -> None:
    moved = item("grad_output", DY, **changes)

    assert measured(item("input", X), item("weight", W), moved).calls == 0


def damaged() -> NDArray[np.generic]:
    raise DamagedRecord("some chunk")


LEFT_OUT = {
    "a quantised weight": [item("input", X), item("weight", W, attributes={"tensor_class": "torchao.Float8Tensor"})],
    "packed bytes": [item("input", X), item("weight", W.view(np.uint8), dtype="uint8")],
    "an input before the normalisation": [
        item("input", X, attributes={"operands": "input before the normalisation"}), item("weight", W),
    ],
    "shapes that do not fit": [item("input", X[..., :16]), item("weight", W)],
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_cannot_be_measured_is_left_out_and_counted(case: str) -> None:
    found = measured(*LEFT_OUT[case], item("grad_output", DY))

    assert (found.calls, found.measured, found.left_out, levels(found)) == (1, 0, 1, {})


def test_an_operand_that_cannot_be_read_again_leaves_its_call_out_and_is_named() -> None:
    whole = item("input", X)
    broken = Item(whole.name, whole.nbytes, whole.load, damaged)

    found = measured(broken, item("weight", W), item("grad_output", DY))

    assert (found.calls, found.measured, found.left_out) == (1, 0, 1)
    assert [one.name for one in found.skipped] == ["fc/input#0"]
    assert found.skipped[0].reason.endswith("some chunk")


def note(take: str, *whole: int) -> dict[str, Any]:
    return {"slice": {"take": take, "of": list(whole)}}


def test_a_slice_of_tokens_gives_no_product_over_the_tokens() -> None:
    found = measured(
        item("input", X, metadata=note("first:2", 4, 8, INPUTS)),
        item("weight", W),
        item("grad_output", DY, metadata=note("first:2", 4, 8, OUTPUTS)),
    )

    assert (found.calls, found.measured, found.partial) == (1, 1, 1)
    assert levels(found) == {
        label: {name: level for name, level in errors.items() if name != "dW"}
        for label, errors in expected(X, W, DY).items()
    }


def test_operands_of_different_tokens_are_no_call() -> None:
    found = measured(
        item("input", X, metadata=note("first:2", 4, 8, INPUTS)),
        item("weight", W),
        item("grad_output", DY, metadata=note("first:4@1", 2, 8, OUTPUTS)),
    )

    assert (found.calls, found.measured, found.left_out) == (1, 0, 1)


def test_many_calls_are_chosen_evenly_over_the_modules() -> None:
    items = [
        item(name, values, module=f"m{module}", iteration=iteration)
        for module in range(5)
        for iteration in range(20)
        for name, values in (("input", X * 2.0**module), ("weight", W), ("grad_output", DY))
    ]

    found = measured(*items)

    assert (found.calls, found.measured, found.left_out) == (100, MOST_CALLS, 0)
    errors = found.of("mxfp8")["Y"].errors
    assert errors.records == MOST_CALLS
    # Seven calls of the first two modules, six of the other three. A power of two scales Y and nothing else.
    one = measured(*items[:3]).of("mxfp8")["Y"].errors
    times = sum(share * 4**module for module, share in enumerate((7, 7, 6, 6, 6)))
    assert errors.sums.x2 == times * one.sums.x2


def test_fewer_of_large_calls_are_measured_and_a_single_large_one_ousts_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [
        item(
            name,
            np.tile(values, (9, 1, 1)) if module == 0 and name != "weight" else values,
            module=f"m{module}",
        )
        for module in range(9)
        for name, values in (("input", X), ("weight", W), ("grad_output", DY))
    ]
    small = sum(each.nbytes for each in items[-3:])

    monkeypatch.setattr(product_measurement, "_MOST_NBYTES", 8 * small)
    assert measured(*items).measured >= 4
    monkeypatch.setattr(product_measurement, "_MOST_NBYTES", 2 * small)
    assert measured(*items[3:]).measured == 2
    monkeypatch.setattr(product_measurement, "_MOST_NBYTES", 1)
    assert measured(*items).measured == 1


def test_without_formats_nothing_is_measured() -> None:
    gathered = GatheredRecords(calls=LinearCalls())
    for _ in gather([item("input", X)], gathered, threads=1):
        pass

    assert gathered.products is None
