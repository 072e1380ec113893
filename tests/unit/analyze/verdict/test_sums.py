"""The sums of the verdict: exact by role, close by tensor, and the worst tensors first."""

from __future__ import annotations

import math

import numpy as np
import pytest

from capd.analyze.error_sums import Errors
from capd.analyze.verdict.score import best_of
from capd.analyze.verdict.sums import VerdictSums
from capd_client.protocol.key import Key


def errors(noise: float, *, lost: int = 0, size: int = 8) -> Errors:
    """Values 1, each wrong by `noise`."""
    x = np.ones(size - lost)
    found = Errors(1, size, lost=lost)
    found.add_values(x, x + noise)
    return found


def key(name: str, module: str, operation: str = "forward") -> Key:
    return Key(quant_type="bf16", rank=0, tensor_name=name, module=module, operation=operation)


@pytest.fixture
def sums() -> VerdictSums:
    found = VerdictSums()
    for module, noise in (("a", 0.1), ("b", 0.01), ("c", 0.0)):
        found.add(key("input", module), f"{module}/input", {"fp8": errors(noise), "mxfp4": errors(2 * noise)})
    # tensor_saver's files come by their time, so the records of a key are no neighbours.
    found.add(key("input", "b"), "other file", {"fp8": errors(0.03)})
    found.add(key("weight", "a"), "a/weight", {"fp8": errors(0.5), "mxfp4": errors(0.2, lost=2)})
    found.add(key("ids", "a"), "a/ids", {})
    return found


def test_errors_of_a_role_are_the_sums_of_its_tensors(sums: VerdictSums) -> None:
    assert set(sums.roles) == {"activations", "weights"}
    activations = sums.roles["activations"]["fp8"]
    assert activations.records == 4
    d2 = sum(8 * noise**2 for noise in (0.1, 0.01, 0.03))
    assert activations.sqnr_db == pytest.approx(10 * math.log10(4 * 8 / d2))
    assert best_of(sums.roles["weights"]) == "fp8"


def test_the_worst_tensors_lose_values_or_have_the_lowest_sqnr(sums: VerdictSums) -> None:
    worst = sums.worst({"activations": "fp8", "weights": "mxfp4"}, 10)

    assert [path for _, path, _, _ in worst] == ["a/weight", "a/input", "b/input"]
    assert [role for _, _, role, _ in worst] == ["weights", "activations", "activations"]
    assert worst[1][3].sqnr_db == pytest.approx(20)
    assert worst[2][3].sqnr_db == pytest.approx(10 * math.log10(16 / (8 * 0.01**2 + 8 * 0.03**2)))
    assert (worst[0][3].lost, worst[0][3].count) == (2, 8)
    assert len(sums.worst({"activations": "fp8"}, 1)) == 1
    assert sums.worst({"activations": "nvfp4"}, 10) == []


def test_a_format_without_an_sqnr_is_the_best_of_nothing() -> None:
    assert best_of({}) is None
    assert best_of({"fp8": Errors(1, 4, lost=4)}) is None
