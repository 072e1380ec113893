"""The sums of the verdict: exact by role, close by tensor, scores over the tensors, and the worst tensors first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import choices
from capd.analyze.verdict.levels import Levels
from capd.analyze.verdict.score import RoleScores, best_of
from capd.analyze.verdict.sums import VerdictSums
from capd_client.protocol.key import Key

FORMATS = choices("fp8,mxfp4")


def errors(noise: float, *, lost: int = 0, size: int = 8, **more: Any) -> Errors:
    """Values 1, each wrong by `noise`."""
    x = np.ones(size - lost)
    found = Errors(1, size, lost=lost, **more)
    found.add_values(x, x + noise)
    return found


def key(name: str, module: str, operation: str = "forward") -> Key:
    return Key(quant_type="bf16", rank=0, tensor_name=name, module=module, operation=operation)


def added(sums: VerdictSums, name: str, module: str, found: dict[str, Errors]) -> None:
    sums.add(key(name, module), f"{module}/{name}", "bfloat16", found)


@pytest.fixture
def sums() -> VerdictSums:
    found = VerdictSums()
    for module, noise in (("a", 0.1), ("b", 0.01), ("c", 0.0)):
        added(found, "input", module, {"fp8": errors(noise), "mxfp4": errors(2 * noise)})
    # tensor_saver's files come by their time, so the records of a key are no neighbours.
    found.add(key("input", "b"), "other file", "bfloat16", {"fp8": errors(0.03), "mxfp4": errors(0.06)})
    added(found, "weight", "a", {"fp8": errors(0.5), "mxfp4": errors(0.2, lost=2)})
    added(found, "ids", "a", {})
    return found


def levels_of(role: RoleScores) -> dict[str, Levels]:
    return {one.label: one.levels for one in role.scores if one.levels is not None}


def test_errors_of_a_role_are_the_sums_of_its_tensors(sums: VerdictSums) -> None:
    assert set(sums.roles) == {"activations", "weights"}
    activations = sums.roles["activations"]["fp8"]
    assert activations.records == 4
    d2 = sum(8 * noise**2 for noise in (0.1, 0.01, 0.03))
    assert activations.sqnr_db == pytest.approx(10 * math.log10(4 * 8 / d2))
    assert best_of(sums.roles["weights"]) == "fp8"


def test_a_score_counts_each_tensor_once_whatever_its_values(sums: VerdictSums) -> None:
    activations, weights = sums.scored(FORMATS)

    assert (activations.role, weights.role) == ("activations", "weights")
    levels = levels_of(activations)["fp8"]
    assert (levels.tensors, levels.tenth_db, levels.error_db) == (3, pytest.approx(20), 0)
    assert levels.median_db == pytest.approx(10 * math.log10(16 / (8 * 0.01**2 + 8 * 0.03**2)))
    assert [one.lost for one in weights.scores] == [0, 2]
    assert (activations.best, weights.best) == ("fp8", "fp8")


def test_records_with_inf_or_nan_are_left_out_for_all_formats(sums: VerdictSums) -> None:
    before = sums.scored(FORMATS)[0]

    added(sums, "input", "d", {"fp8": errors(0.5, inf=1), "mxfp4": errors(0.5, inf=1, lost=5)})

    after = sums.scored(FORMATS)[0]
    assert (after.left_out, after.records) == (1, before.records + 1)
    assert after.scores == before.scores
    assert not any(one.lost for one in sums.roles["activations"].values())


def test_formats_are_compared_on_the_tensors_that_all_took(sums: VerdictSums) -> None:
    added(sums, "input", "d", {"mxfp4": errors(0.9)})

    [activations, _] = sums.scored(FORMATS)

    assert [one.taken for one in activations.scores] == [3, 4]
    assert {label: one.tensors for label, one in levels_of(activations).items()} == {"fp8": 3, "mxfp4": 3}


def test_tensors_of_zeros_are_counted_and_have_no_level(sums: VerdictSums) -> None:
    zeros = Errors(1, 8)
    added(sums, "grad_output", "a", {"fp8": zeros, "mxfp4": zeros})

    [*_, gradients] = sums.scored(FORMATS)

    assert (gradients.role, gradients.zeros, levels_of(gradients), gradients.best) == (
        "gradients",
        1,
        {},
        None,
    )


def test_a_sampled_tensor_has_an_error_and_a_whole_one_has_none() -> None:
    sums = VerdictSums()
    for noise in (0.1, 0.12, 0.09, 0.11):
        added(sums, "input", "a", {"fp8": errors(noise)})
    [whole] = sums.scored(FORMATS[:1])
    sums.leave_unread(key("input", "a"), "a/input")
    [sampled] = sums.scored(FORMATS[:1])

    decibels = [-20 * math.log10(noise) for noise in (0.1, 0.12, 0.09, 0.11)]
    assert levels_of(whole)["fp8"].error_db == 0
    assert levels_of(sampled)["fp8"].error_db == pytest.approx(np.std(decibels, ddof=1) / 2)


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
