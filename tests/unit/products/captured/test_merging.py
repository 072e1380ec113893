"""Tensors of one module under several dtypes: one product without labels, and several with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.products.captured.calls import ProductCall
from capd_client.protocol.key import Moment
from tests.kit.jobs.products import calls_of_run
from tests.kit.store.cli import StoreWriter, linear_key

TENSORS = {"input": "bfloat16", "weight": "bfloat16", "output": "bfloat16", "grad_weight": "float32"}
OWN = {"bfloat16": "bf16", "float32": "fp32", "int32": "int32"}


def put(
    root: Path, labels: dict[str, str], tensors: dict[str, str], runs: tuple[str, ...] = ("",)
) -> list[ProductCall]:
    """Write the tensors of one module. labels: the quant type by dtype. runs: words that begin the quant types."""
    writer = StoreWriter(root)
    for label in runs:
        for name, dtype in tensors.items():
            operation = "backward" if name.startswith("grad") else "forward"
            key = linear_key(
                quant_type=label + labels[dtype], tensor_name=name, operation=operation, module="m0", layer=0
            )
            kind: Any = {"bfloat16": np.uint16}.get(dtype, dtype)
            writer.put("run", key, np.ones((4, 4), kind), dtype, Moment())
    writer.close()
    return [call for module in calls_of_run(root / "run.zarr").by_module(("x", "dw")) for call in module]


def test_tensors_without_a_label_are_of_one_product(tmp_path: Path) -> None:
    [call] = put(tmp_path, OWN, TENSORS)
    assert sorted(call.tensors) == ["dw", "w", "x", "y"]
    assert call.place["quant_type"] == "bf16"


def test_a_label_keeps_the_types_of_a_collection_apart(tmp_path: Path) -> None:
    calls = put(tmp_path, dict.fromkeys(OWN, "fp8"), TENSORS, ("mx", "nv"))
    assert [call.place["quant_type"] for call in calls] == ["mxfp8", "nvfp8"]
    assert all(len(call.tensors) == 4 for call in calls)


@pytest.mark.parametrize("lost", ["", "bf16", "fp32"])
def test_labels_that_are_the_dtypes_of_two_runs_are_two_products(tmp_path: Path, lost: str) -> None:
    """Each of the two types was trained in its own dtype, so the labels say nothing that the dtypes do not.

    A run whose weight was lost has none, and not that of the other one.
    """
    writer = StoreWriter(tmp_path)
    for dtype, label in (("bfloat16", "bf16"), ("float32", "fp32")):
        for name in ("input", "output", *(() if label == lost else ("weight",))):
            key = linear_key(quant_type=label, tensor_name=name, module="m0", layer=0)
            kind: Any = {"bfloat16": np.uint16}.get(dtype, dtype)
            writer.put("run", key, np.ones((4, 4), kind), dtype, Moment())
    writer.close()
    calls = [call for module in calls_of_run(tmp_path / "run.zarr").by_module() for call in module]
    found = {
        call.place["quant_type"]: {name: one.dtype for name, one in call.tensors.items()} for call in calls
    }
    assert found == {
        label: dict.fromkeys(("x", "y") if label == lost else ("x", "w", "y"), dtype)
        for label, dtype in (("bf16", "bfloat16"), ("fp32", "float32"))
    }
