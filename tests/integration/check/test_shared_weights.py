"""Weights with gradients of several products: what is theirs is checked, and the rest is counted, with no alarm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.integration.check.shared_weights_job import ROWS, STEPS
from tests.kit.jobs.captured import run_captured
from tests.kit.jobs.layouts import Layout, run_layout
from tests.kit.jobs.products import assert_products_hold, checked_run

pytestmark = pytest.mark.timeout(300)
MODULE = "tests.integration.check.shared_weights_job"
TIED = "dW: grad_weight: other modules have the same weight, and their gradients are in it"
CALLS = 2 * STEPS


def trained(directory: Path, job: str, ranks: int | None = None) -> Path:
    return run_captured(directory, job, MODULE, job, ranks=ranks)


@pytest.mark.parametrize(
    ("job", "tied"), [("tied", 1), ("tied_late", 1), pytest.param("two_uses", 2, marks=pytest.mark.slow)]
)
def test_gradients_of_tied_weights_are_counted_and_all_else_is_checked(
    tmp_path: Path, job: str, tied: int
) -> None:
    run = trained(tmp_path, job)
    assert_products_hold(run)
    checked = checked_run(run)
    assert checked.left_out == {TIED: tied * CALLS}
    assert Counter(one.product for one in checked.findings) == {
        "y": 2 * CALLS, "dx": 2 * CALLS, **({"dw": CALLS} if tied == 1 else {})
    }  # fmt: skip


def test_a_gradient_that_one_backward_adds_up_over_micro_batches_is_their_sum(tmp_path: Path) -> None:
    checked = checked_run(trained(tmp_path, "one_backward"))
    assert (checked.beyond, checked.left_out) == ([], {})
    found = {
        product: [one for one in checked.findings if one.product == product] for product in ("y", "dx", "dw")
    }
    assert [len(one) for one in found.values()] == [4 * CALLS, 4 * CALLS, 2 * CALLS]
    # The first of both micro-batches has the sum, which its own rows alone do not give.
    assert {one.call.place["micro_batch"] for one in found["dw"]} == {0, 2}
    assert found["dw"][0].call.tensors["x"].shape[0] == ROWS


@pytest.mark.slow
def test_a_weight_that_the_job_gathers_is_that_of_the_product(tmp_path: Path) -> None:
    run = trained(tmp_path, "gathered", 2)
    assert assert_products_hold(run)["dw"] == 2 * 2 * 2 * CALLS
    assert not checked_run(run).left_out


@pytest.mark.slow
def test_words_that_pad_a_vocabulary_are_multiplied_too(tmp_path: Path) -> None:
    """Their logits have gradients, so dX of the head is that of the padded operands."""
    run = run_layout(Layout(tp=2, ranks=2, layers=1, vocabulary=29), tmp_path)
    assert_products_hold(run)
    heads = [one for one in checked_run(run).findings if one.call.place["module"] == "output_layer"]
    assert {one.product for one in heads} == {"y", "dx", "dw"}
    assert heads[0].call.tensors["w"].shape[0] > 29
