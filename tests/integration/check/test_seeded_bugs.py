"""Seeded bugs in real jobs: `capd check` names the module, the rows and the factor from one run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from capd.check.document import check_document
from capd.check.judging import ProductLimits
from tests.integration.check.seeded_job import BUGS, STALE, TOKENS
from tests.kit.jobs.captured import run_captured
from tests.kit.jobs.layouts import Layout, run_layout
from tests.kit.jobs.products import checked_run

pytestmark = pytest.mark.timeout(300)
BFLOAT16 = "bfloat16"
PLUGIN = "tests.integration.check.seeded_bugs"


def document_of(run: Path, *, is_whole: bool) -> dict[str, Any]:
    return check_document(
        str(run), checked_run(run, by_rank=not is_whole), ProductLimits(), (), is_whole=is_whole
    )


@pytest.fixture(scope="module")
def beyond(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What is beyond a limit in the job of linears with one bug each."""
    root = tmp_path_factory.mktemp("seeded")
    run = run_captured(root, "job", "tests.integration.check.seeded_job")
    document = document_of(run, is_whole=False)
    # The input of the first linear needs no gradient.
    assert document["checked"] == 2 * (3 * len(BUGS) - 1)
    first: list[dict[str, Any]] = document["first"]
    return first


def test_only_the_products_with_a_bug_are_named(beyond: list[dict[str, Any]]) -> None:
    named = {(one["module"], one["product"], one["iteration"]) for one in beyond}
    everywhere = {"times105": "y", "times101": "y", "half_tokens": "dw", "quarter": "dw", "twice": "dx"}
    expected = {(f"linears.{bug}", product, step) for bug, product in everywhere.items() for step in range(2)}
    # The first iteration has no older row.
    assert named == expected | {("linears.stale_row", "y", 1)}


@pytest.mark.parametrize(
    ("bug", "alpha"), [("times105", 1.05), ("times101", 1.01), ("quarter", 0.25), ("twice", 2.0)]
)
def test_the_factor_fits(beyond: list[dict[str, Any]], bug: str, alpha: float) -> None:
    factors = [one["factor"] for one in beyond if one["module"] == f"linears.{bug}"]
    assert [one["alpha"] for one in factors] == pytest.approx([alpha, alpha], rel=1e-3)
    assert all(one["rest"] < 1 for one in factors)


def test_the_stale_row_is_named(beyond: list[dict[str, Any]]) -> None:
    [stale] = [one for one in beyond if one["module"] == "linears.stale_row"]
    assert (stale["rows"]["first"], stale["rows"]["of"]) == ([STALE], TOKENS)
    assert stale["rows"]["error"] > 100


def seeded(tmp_path: Path, bug: str, **layout: Any) -> dict[str, Any]:
    own = Layout(tp=2, ranks=2, layers=1, dtype=BFLOAT16, plugin=f"{PLUGIN}:{bug}", **layout)
    return document_of(run_layout(own, tmp_path), is_whole=True)


def test_a_gradient_reduced_twice_is_tp_times_too_large(tmp_path: Path) -> None:
    document = seeded(tmp_path, "reduced_twice")
    assert {one["product"] for one in document["first"]} == {"dx"}
    assert document["first"][0]["module"] == "output_layer"
    for one in document["first"]:
        assert one["module"] == "output_layer" or one["module"].endswith(("linear_qkv", "linear_fc1"))
        assert "tp_size" in one["factor"]["is"]
        assert one["factor"]["rest"] < 2


@pytest.mark.slow
def test_a_gradient_that_is_not_reduced_is_named(tmp_path: Path) -> None:
    document = seeded(tmp_path, "without_reduce")
    first = document["first"][0]
    assert (first["product"], first["module"]) == ("dx", "output_layer")
    assert {"dx"} == {one["product"] for one in document["first"]}
    assert any("grad_output: ranks have" in one["reason"] for one in document["not_comparable"])
    assert not {"y", "o"} & {one["product"] for one in document["first"]}


@pytest.mark.slow
def test_a_bias_that_each_rank_adds_is_named(tmp_path: Path) -> None:
    document = seeded(tmp_path, "bias_on_each_rank")
    assert {(one["module"].rpartition(".")[2], one["product"]) for one in document["first"]} == {
        ("linear_fc2", "y")
    }


@pytest.mark.slow
def test_a_sequence_gathered_in_the_wrong_order_is_named(tmp_path: Path) -> None:
    document = seeded(tmp_path, "gathered_in_wrong_order", sp=True)
    assert document["beyond"]
    forward = {one["module"].rpartition(".")[2] for one in document["first"] if one["product"] == "y"}
    assert forward == {"linear_qkv", "linear_fc1", "output_layer"}
