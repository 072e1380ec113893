"""The distance of two tensors in steps of their dtype."""

from __future__ import annotations

import math

import pytest
import torch

from capd.replay.sums import CapturedDistance
from capd.replay.ulps import captured_distance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_neighbours_are_one_step_apart(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -1.0, 0.0, 2.0, -3.0, 5.0], dtype=dtype)
    other = values.clone()
    other[0] = 1.0 + torch.finfo(dtype).eps
    other[1] = -1.0 - 2 * torch.finfo(dtype).eps
    other[2] = -0.0
    assert captured_distance(values, other) == CapturedDistance(calls=1, values=6, equal=3, max_ulp=2)
    assert captured_distance(values, values) == CapturedDistance(calls=1, values=6, equal=6)


def test_steps_are_counted_over_zero() -> None:
    smallest = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    a, b = torch.tensor([smallest]), torch.tensor([-smallest])
    assert captured_distance(a, b).max_ulp == 3


def test_what_is_not_finite_on_a_side_is_counted_apart() -> None:
    a = torch.tensor([1.0, math.inf, math.nan, 4.0])
    b = torch.tensor([1.0, 3.0, math.nan, -math.inf])
    assert captured_distance(a, b) == CapturedDistance(calls=1, values=4, equal=2, nonfinite=2)


def test_distances_add_up() -> None:
    found = CapturedDistance(1, 6, 3, 2)
    found.add(CapturedDistance(1, 4, 4, 0, 1))
    assert found == CapturedDistance(2, 10, 7, 2, 1)
