"""Emulated jobs: the products hold against quantised operands, and would not against the captured ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from capd.products.captured.calls import CapturedTensor
from tests.integration.replay.test_replayed_jobs import trained
from tests.kit.jobs.products import checked_run

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize(
    ("dtype", "quant_type"),
    [
        ("bfloat16", "mxfp8"),
        pytest.param("float32", "mxfp4", marks=pytest.mark.slow),
        pytest.param("bfloat16", "nvfp4", marks=pytest.mark.slow),
    ],
)
def test_products_are_those_of_the_quantised_operands(
    tmp_path: Path, dtype: str, quant_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, dtype, quant_type)
    checked = checked_run(run)
    assert not checked.beyond
    assert not [reason for reason in checked.left_out if "not captured" in reason or "not known" in reason]
    found = {one.product for one in checked.findings}
    random = {reason.partition(":")[0] for reason in checked.left_out if reason.endswith("rounded at random")}
    assert {"y"} <= found
    assert {name.lower() for name in random} | found == {"y", "dx", "dw"}

    def told_nothing(tensor: CapturedTensor) -> CapturedTensor:
        return tensor._replace(emulation=None)

    from capd.products.captured.calls import ProductCalls

    add = ProductCalls._add
    monkeypatch.setattr(
        ProductCalls, "_add", lambda self, layer, at, name, one: add(self, layer, at, name, told_nothing(one))
    )
    assert checked_run(run).beyond
