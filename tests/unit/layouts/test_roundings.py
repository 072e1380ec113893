"""The guessed roundings: sums of rounded terms drawn here stay near them, and what the sizes of a product change."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from capd.layouts.factor import relative_error
from capd.layouts.limits import Limits
from capd.layouts.roundings import Roundings
from capd.layouts.views import aspects_of
from capd.layouts.whole_run import TensorName, WholeRun
from capd.store.read.store import open_store
from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter
from tests.kit.store.parts import linear

EPS, NARROW = 2.0**-24, 2.0**-8
TERMS, OUT, TOKENS = 600, 96, 54
OUTPUT, GRADIENT, MAIN = (
    TensorName("layers.0.fc1", operation, tensor)
    for operation, tensor in (("forward", "output"), ("backward", "grad_weight"), ("backward", "main_grad"))
)


@pytest.fixture
def run(tmp_path: Path) -> WholeRun:
    """One linear in two micro-batches."""
    writer = StoreWriter(tmp_path, "node0")
    shapes = {"input": (TOKENS, TERMS), "weight": (OUT, TERMS), "output": (TOKENS, OUT)}
    for micro_batch in range(2):
        for order, (tensor, shape) in enumerate({**shapes, "grad_output": (TOKENS, OUT)}.items()):
            moment = Moment(iteration=0, micro_batch=micro_batch, time_ns=1 + order)
            writer.put("run", linear(tensor), np.ones(shape, np.float32), "float32", moment)
    return WholeRun(open_store(writer.close() / "run.zarr"))


def test_a_product_adds_the_roundings_of_its_result_its_ranks_and_its_terms(run: WholeRun) -> None:
    assert Roundings(run, 1).estimate(OUTPUT, 0, EPS) == pytest.approx(EPS * math.sqrt(1 + TERMS / 6))
    assert Roundings(run, 8).estimate(OUTPUT, 0, EPS) == pytest.approx(EPS * math.sqrt(1 + 3 + TERMS / 6))
    # Terms are added up in float32.
    assert Roundings(run, 8).estimate(OUTPUT, 0, NARROW) == pytest.approx(NARROW * 2, rel=1e-6)


def test_gradients_of_parameters_add_the_sum_over_their_tokens(run: WholeRun) -> None:
    found = Roundings(run, 1)
    found.estimate(OUTPUT, 0, EPS)
    terms = TERMS + OUT
    assert found.estimate(GRADIENT, 0, EPS) == pytest.approx(EPS * math.sqrt(2 + (terms + TOKENS) / 6))
    assert found.estimate(MAIN, 0, EPS) == pytest.approx(EPS * math.sqrt(2 + (terms + 2 * TOKENS) / 6))
    # Asked again, a product counts no second time; in the next iteration it does.
    assert found.estimate(OUTPUT, 0, EPS) == pytest.approx(EPS * math.sqrt(1 + TERMS / 6))
    assert found.estimate(OUTPUT, 1, EPS) == pytest.approx(EPS * math.sqrt(3 + (terms + TERMS) / 6))


def test_a_parameter_has_the_roundings_of_earlier_steps_alone(run: WholeRun) -> None:
    found, weight = Roundings(run, 1), OUTPUT._replace(tensor="weight")
    assert found.estimate(weight, 0, EPS) == 0.0
    after = found.estimate(OUTPUT, 0, EPS)
    assert after == pytest.approx(EPS * math.sqrt(1 + TERMS / 6))
    assert found.estimate(weight, 1, EPS) == after


def test_a_tensor_keeps_the_error_of_the_products_before_it_whatever_its_own_dtype(run: WholeRun) -> None:
    found = Roundings(run, 1)
    found.estimate(OUTPUT, 0, NARROW)
    assert found.estimate(MAIN, 0, EPS) == pytest.approx(NARROW, rel=1e-3)


def test_a_sum_in_the_order_of_its_terms_has_the_guessed_error(run: WholeRun) -> None:
    """The guess is neither far below nor far above what rounding does to a product of random numbers."""
    draw = np.random.default_rng(11)
    x, w = (draw.standard_normal((TOKENS, TERMS)).astype(np.float32) for _ in range(2))
    exact = (x.astype(np.float64) * w).sum(axis=-1)
    found = np.cumsum(x * w, axis=-1, dtype=np.float32)[:, -1]
    ratio = relative_error(found, exact) / Roundings(run, 1).estimate(OUTPUT, 0, EPS)
    assert 0.3 < ratio < 2


def test_no_guess_accepts_a_factor_of_two(run: WholeRun) -> None:
    [aspect] = [one for one in aspects_of(run, run, None).found if one.name == OUTPUT]
    limits = Limits(run, [], 1e5, 2)
    assert limits.of(aspect, 0, NARROW).value == 0.49
