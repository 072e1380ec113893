"""The best-fit factor, and which sizes explain it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from capd.layouts.experts import matched_rows, rerouted_tokens
from capd.layouts.factor import explanations, fit, relative_error

A = np.random.default_rng(3).standard_normal((5, 7)).astype(np.float32)


def test_a_scaled_tensor_has_its_factor_and_no_residual() -> None:
    found = fit(A * np.float32(0.5), A)
    assert found.factor == 0.5
    assert found.residual == 0.0
    assert found.error == pytest.approx(0.5)


def test_the_residual_is_what_the_factor_leaves() -> None:
    noise = np.random.default_rng(4).standard_normal(A.shape).astype(np.float32) * 1e-3
    found = fit(2 * A + noise, A)
    assert found.factor == pytest.approx(2, abs=1e-3)
    assert found.residual == pytest.approx(np.linalg.norm(noise) / np.linalg.norm(2 * A), rel=0.1)


def test_zeros_and_special_values_have_no_factor() -> None:
    assert fit(A, np.zeros_like(A)) == (math.inf, None, None)
    assert fit(np.zeros_like(A), np.zeros_like(A)).error == 0.0
    assert fit(np.zeros_like(A), A) == (1.0, 0.0, None)
    bad = A.copy()
    bad[0, 0] = np.nan
    assert fit(bad, A) == (math.inf, None, None)
    assert relative_error(A, bad) == math.inf


def test_sizes_explain_a_factor_alone_first_then_in_products() -> None:
    sizes = {"tp_size": 2, "dp_size": 2, "cp_size": 1, "micro_batches": 8}
    assert explanations(2.0, sizes) == ["tp_size", "dp_size"]
    assert explanations(0.5004, sizes) == ["1/tp_size", "1/dp_size"]
    assert explanations(4.0, sizes) == ["tp_size·dp_size"]
    assert explanations(1 / 16, sizes) == ["1/(tp_size·micro_batches)", "1/(dp_size·micro_batches)"]
    for factor in (1.0, 0.5016, 3.0, -2.0, 0.0, math.nan):
        assert explanations(factor, sizes) == []


def test_rows_are_found_again_in_any_order() -> None:
    order = np.array([3, 1, 4, 0, 2])
    np.testing.assert_array_equal(matched_rows(A[order], A), A)
    assert matched_rows(A[[0, 0, 1, 2, 3]], A) is None
    assert matched_rows(A[:3], A) is None


def test_tokens_with_other_experts_are_counted() -> None:
    logits = np.array([[3.0, 2, 1, 0], [0, 1, 2, 3], [5, 4, 0, 0]])
    other = np.array([[2.0, 3, 1, 0], [0, 3, 2, 1], [5, 4, 0, 0]])
    # The order of a token's experts does not count.
    assert rerouted_tokens(other, logits, 2) == 1
    assert rerouted_tokens(other, logits, 1) == 2
    assert rerouted_tokens(other, logits, 4) == 0
