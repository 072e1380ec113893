"""The verdict in words, on made scores with known answers: it says what the numbers say, and nothing else."""

from __future__ import annotations

import math
from typing import Any

from capd.analyze.verdict.levels import Levels
from capd.analyze.verdict.score import RoleScores, Score
from capd.analyze.verdict.sentences import sentence_of, short_percent
from capd.analyze.verdict.statements import statements_of
from capd.phrase import phrase_text

A, W, G = "activations", "weights", "gradients"
BITS = {"fp8": 8, "mxfp8": 8.25, "hifp8": 8, "mxfp4": 4.25, "nvfp4": 4.5, "bf16": 16, "fp16": 16}
UNSCALED = ("hifp8", "bf16", "fp16")
Row = tuple[float | None, ...]


def score(label: str, tenth: float | None, **more: Any) -> Score:
    error, poor = more.pop("error", 0.0), more.pop("poor", 0)
    levels = None if tenth is None else Levels(10, tenth + 1, tenth, error, poor)
    values: dict[str, Any] = {"count": 4096, "taken": 10, "is_scaled": label not in UNSCALED, **more}
    return Score(label, BITS[label], levels, **values)


def verdict(
    table: dict[str, Row], more: dict[tuple[str, str], dict[str, Any]] | None = None, **of_all: Any
) -> list[RoleScores]:
    """Scores by format, one for each role; `more`: further values of some."""
    return [
        RoleScores(
            role,
            [
                score(label, row[place], **of_all, **(more or {}).get((label, role), {}))
                for label, row in table.items()
                if place < len(row)
            ],
            tensors=10,
            records=40,
        )
        for place, role in enumerate((A, W, G))
        if any(place < len(row) for row in table.values())
    ]


def said(found: list[RoleScores]) -> list[str]:
    return [phrase_text(sentence_of(one)) for one in statements_of(found)]


def test_the_format_with_the_best_weakest_role_is_chosen_and_the_largest_loss_is_named() -> None:
    found = verdict(
        {"fp8": (31.5, 31.5, 31.0), "mxfp8": (31.4, 31.24, 30.96), "hifp8": (31.2, 31.3, 20.06)},
        {("hifp8", G): {"underflow_percent": 1.0, "flush_percent": 40.0}},
    )

    assert said(found) == [
        "fp8 keeps 31.0 dB or more on nine of ten tensors of activations, weights and gradients, at 8 bits a value; "
        "no other format keeps more.",
        "hifp8 without a scale loses 10.9 dB on gradients against fp8; 40 % of the values are below its smallest "
        "normal one.",
    ]


def test_a_role_on_which_a_format_is_exact_does_not_outweigh_one_that_it_zeroes() -> None:
    found = verdict({"fp16": (math.inf, math.inf, 0.0), "mxfp8": (31.6, 31.6, 30.2)})

    assert said(found)[0].startswith("mxfp8 keeps 30.2 dB or more")
    assert "; no other format keeps more." in said(found)[0]


def test_the_format_of_the_captured_values_is_no_candidate_and_it_is_said() -> None:
    exact = {("bf16", role): {"is_source": True} for role in (A, W, G)}
    found = verdict({"bf16": (math.inf,) * 3, "mxfp8": (31.0,) * 3, "fp8": (30.0,) * 3}, exact)

    assert found[0].best == "mxfp8"
    assert said(found)[0].startswith("fp8 keeps 30.0 dB or more")
    assert said(found)[-1] == "bf16: captured values have this format already, so it is not chosen."


def test_quality_beyond_what_training_needs_is_no_merit() -> None:
    found = verdict({"bf16": (60.0,) * 3, "mxfp8": (49.39,) * 3})

    assert said(found) == [
        "mxfp8 keeps 49.3 dB or more on nine of ten tensors of activations, weights and gradients, at 8.25 bits a "
        "value; the best keeps 0.7 dB more."
    ]


def test_a_loss_among_formats_of_as_many_bits_comes_before_a_larger_one_to_more_bits() -> None:
    found = verdict(
        {"fp8": (31.0,) * 3, "mxfp8": (31.0, 28.0, 31.0), "mxfp4": (18.0,) * 3},
        {("mxfp8", W): {"saturation_percent": 9.7, "flush_percent": 0.2}},
    )

    assert (
        said(found)[1]
        == "mxfp8 loses 3.0 dB on weights against fp8; 9.7 % of the values are beyond its largest one."
    )


def test_without_a_format_of_as_many_bits_the_bits_are_said() -> None:
    found = verdict({"mxfp8": (31.0,) * 3, "mxfp4": (18.0, 18.5, 18.4)})

    assert said(found)[1] == "mxfp4 loses 13.0 dB on activations against mxfp8, at 4.25 bits instead of 8.25."


def test_a_share_of_nearly_all_values_is_not_rounded_to_all() -> None:
    found = verdict(
        {"fp8": (31.0,) * 3, "hifp8": (31.0, 31.0, 5.0)},
        {("hifp8", G): {"underflow_percent": 99.96, "flush_percent": 99.97}},
    )

    assert said(found)[1].endswith("against fp8; 99.9 % of the values become zero.")
    assert [short_percent(value) for value in (0, 0.1, 12.25, 9.7, 100.0, 99.96)] == [
        "0", "0.1", "12.2", "9.7", "100", "99.9",
    ]  # fmt: skip


def test_lost_values_come_first_and_a_format_that_loses_is_not_chosen() -> None:
    found = verdict({"fp16": (60.0,) * 3, "mxfp8": (31.0,) * 3}, {("fp16", G): {"lost": 12}})

    assert said(found) == [
        "mxfp8 keeps 31.0 dB or more on nine of ten tensors of activations, weights and gradients, at 8.25 bits a "
        "value; no format without lost values keeps more.",
        "fp16 loses 12 of 4,096 values on gradients: they become Inf or NaN.",
    ]
    assert found[2].best == "mxfp8"


def test_a_format_that_keeps_nothing_is_not_said_to_keep() -> None:
    found = verdict({"hifp8": (31.0, 31.0, 0.0), "mxfp4": (18.0, 17.0, 3.26)})

    assert said(found)[0] == (
        "No format keeps 10 dB on nine of ten tensors of each role; mxfp4 comes nearest: 3.2 dB on gradients."
    )
    assert (
        said(verdict({"fp8": (31.0,) * 3}, {("fp8", G): {"poor": 1}}))[1]
        == "In fp8, 1 of 30 tensors are below 10 dB."
    )


def test_one_format_is_compared_with_itself_on_the_other_roles() -> None:
    reason = {("hifp8", G): {"flush_percent": 33.0, "underflow_percent": 3.0}}

    assert said(verdict({"hifp8": (31.0, 30.0, 12.34)}, reason)) == [
        "hifp8 keeps 12.3 dB or more on nine of ten tensors of activations, weights and gradients, at 8 bits a value; "
        "no other format was compared.",
        "hifp8 without a scale keeps 31.0 dB on activations and 12.3 dB on gradients; 33 % of the values are below its "
        "smallest normal one.",
    ]
    assert len(said(verdict({"mxfp8": (31.0, 31.1, 31.2)}))) == 1


def test_roles_that_were_not_measured_are_named() -> None:
    assert said(verdict({"fp8": (31.0,), "mxfp4": (18.0,)}))[2] == (
        "No weights or gradients were measured, so nothing is said about them."
    )


def test_where_every_format_loses_values_none_is_chosen() -> None:
    lost = {(label, role): {"lost": 7} for label in ("fp16", "hifp8") for role in (A, W, G)}
    lost["fp16", A] = {"lost": 4096}

    assert said(verdict({"fp16": (None,) * 3, "hifp8": (20.0,) * 3}, lost)) == [
        "Every format loses values; hifp8 loses the fewest, 21.",
        "fp16 loses 4,096 of 4,096 values on activations: they become Inf or NaN.",
    ]
    assert said(verdict({"fp16": (None,) * 3}, lost))[0] == "fp16 is no choice as it is: it loses values."


def test_bits_decide_between_equals_and_then_the_order() -> None:
    equal = (31.0, 31.0, 31.0)

    assert said(verdict({"mxfp8": equal, "fp8": equal}))[0].startswith("fp8 keeps 31.0 dB")
    assert said(verdict({"hifp8": equal, "fp8": equal}))[0].startswith("hifp8 keeps 31.0 dB")
    assert said(verdict({"hifp8": equal, "fp8": equal}))[1] == "No format is behind another on any role."


def test_what_a_format_does_not_take_is_said_with_its_role_and_number() -> None:
    found = verdict({"fp8": (31.0,) * 3, "mxfp8": (45.0,) * 3}, {("mxfp8", W): {"taken": 9}})

    assert said(found)[0].startswith("mxfp8 keeps 45.0 dB or more")
    assert (
        said(found)[-1]
        == "mxfp8 does not take 1 of 10 tensors of weights; they are left out for all formats."
    )
    none = verdict({"fp8": (31.0,) * 3, "mxfp8": (45.0, None, 45.0)}, {("mxfp8", W): {"taken": 0}})
    assert said(none)[0].startswith("fp8 keeps 31.0 dB or more")
    assert said(none)[-1] == "mxfp8 takes no tensor of weights, so it is not compared."


def test_zeros_and_records_that_are_not_finite_are_said() -> None:
    scores = [score("fp8", None), score("mxfp8", None)]
    found = [
        RoleScores(A, [score("fp8", 31.0), score("mxfp8", 30.0)], tensors=10, records=40, left_out=3),
        RoleScores(G, scores, tensors=10, zeros=10, records=40),
    ]

    assert said(found) == [
        "fp8 keeps 31.0 dB or more on nine of ten tensors of activations, at 8 bits a value; no other format keeps "
        "more.",
        "mxfp8 loses 1.0 dB on activations against fp8.",
        "10 of 10 tensors of gradients hold zeros alone.",
        "3 of 80 records hold Inf or NaN; they are left out of the verdict for all formats.",
        "No weights were measured, so nothing is said about them.",
    ]
    assert found[1].best is None


def test_tensors_of_no_known_role_are_in_no_sentence() -> None:
    assert said([RoleScores("other", [score("fp8", 3.0)], tensors=10, records=10)]) == []


def test_in_a_sample_nothing_is_said_that_its_error_could_turn_round() -> None:
    found = verdict({"fp8": (31.0,) * 3, "mxfp8": (30.8,) * 3, "mxfp4": (18.0,) * 3}, error=0.15)

    assert [one.best for one in found] == [None, None, None]
    assert said(found) == [
        "fp8 keeps about 31.0 ± 0.2 dB on nine of ten tensors of activations, weights and gradients, at 8 bits a "
        "value; no other format keeps clearly more.",
        "mxfp4 loses about 13.0 dB on activations against fp8, at 4.25 bits instead of 8.",
    ]
    clear = verdict({"fp8": (31.0,) * 3, "mxfp8": (30.0,) * 3}, error=0.15)
    assert clear[0].best == "fp8"
    assert verdict({"fp8": (31.0,) * 3, "mxfp8": (20.0,) * 3}, error=None)[0].best is None


def test_nothing_measured_says_nothing() -> None:
    assert said([]) == []
