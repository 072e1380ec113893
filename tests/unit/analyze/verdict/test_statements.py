"""The verdict in words, on made scores with known answers: it says what the numbers say, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from capd.analyze.verdict.score import Score
from capd.analyze.verdict.sentences import sentence_of
from capd.analyze.verdict.statements import statements_of

A, W, G = "activations", "weights", "gradients"
BITS = {"fp8": 8, "mxfp8": 8.25, "hifp8": 8, "mxfp4": 4.25, "nvfp4": 4.5, "bf16": 16, "fp16": 16}


def score(label: str, role: str, sqnr: float | None, **more: Any) -> Score:
    values: dict[str, Any] = {"records": 10, "count": 4096, **more}
    scaled = label not in ("hifp8", "bf16", "fp16")
    return Score(label, BITS[label], scaled, role, sqnr_db=sqnr, **values)


def scores(table: dict[str, tuple[float | None, float | None, float | None]], **more: Any) -> list[Score]:
    return [
        score(label, role, sqnr, **more)
        for label, row in table.items()
        for role, sqnr in zip((A, W, G), row, strict=True)
    ]


def said(found: list[Score]) -> list[str]:
    return [sentence_of(one) for one in statements_of(found)]


def test_the_smallest_format_near_the_best_is_named_and_the_largest_loss_with_its_reason() -> None:
    found = scores({"fp8": (31.5, 31.5, 31.0), "mxfp8": (31.4, 31.24, 30.96), "hifp8": (31.2, 31.3, 20.06)})
    found[-1] = score("hifp8", G, 20.06, underflow_percent=1.0, flush_percent=40.0)

    assert said(found) == [
        "fp8 keeps 31.0 dB or more on activations, weights and gradients, and no format is better there, at 8 bits a "
        "value.",
        "hifp8 without a scale loses 10.9 dB on gradients against fp8; 40 % of the values are below its smallest "
        "normal one.",
    ]


def test_what_is_behind_is_rounded_up_and_what_is_kept_down() -> None:
    found = scores({"bf16": (50.0, 50.0, 50.0), "mxfp8": (49.39, 49.39, 49.39)})

    assert said(found) == [
        "mxfp8 keeps 49.3 dB or more on activations, weights and gradients, within 0.7 dB of the best, at 8.25 "
        "bits a value.",
        "No format is more than 0.7 dB behind the best on any role.",
    ]


def test_a_loss_among_formats_of_as_many_bits_comes_before_a_larger_one_to_more_bits() -> None:
    found = scores({"fp8": (31.0, 31.0, 31.0), "mxfp8": (31.0, 28.0, 31.0), "mxfp4": (18.0, 18.0, 18.0)})
    found[4] = score("mxfp8", W, 28.0, saturation_percent=9.7, flush_percent=0.2)

    assert said(found)[1] == (
        "mxfp8 loses 3.0 dB on weights against fp8; 9.7 % of the values are beyond its largest one."
    )


def test_without_a_format_of_as_many_bits_the_bits_are_said() -> None:
    found = scores({"mxfp8": (31.0, 31.0, 31.0), "mxfp4": (18.0, 18.5, 18.4)})

    assert said(found)[1] == "mxfp4 loses 13.0 dB on activations against mxfp8, at 4.25 bits instead of 8.25."


def test_values_that_become_zero_are_the_reason_if_they_are_most_of_the_flushed() -> None:
    found = scores({"fp8": (31.0, 31.0, 31.0), "hifp8": (31.0, 31.0, 5.0)})
    found[-1] = score("hifp8", G, 5.0, underflow_percent=60.0, flush_percent=80.0)

    assert said(found)[1].endswith("against fp8; 60 % of the values become zero.")


def test_lost_values_come_first_and_a_format_that_loses_is_never_the_best() -> None:
    found = scores({"fp16": (60.0, 60.0, 60.0), "mxfp8": (31.0, 31.0, 31.0)})
    found[2] = score("fp16", G, 60.0, lost=12)

    assert said(found) == [
        "mxfp8 keeps 31.0 dB or more on activations, weights and gradients, within 29.0 dB of the best without lost "
        "values, at 8.25 bits a value.",
        "fp16 without a scale loses 12 of 4,096 values on gradients: they become Inf or NaN.",
    ]
    lossy = [score("fp16", role, 60.0, lost=1) for role in (A, W, G)]
    assert said([*lossy, *found[3:]])[0] == (
        "mxfp8 keeps 31.0 dB or more on activations, weights and gradients, and no format without lost values is "
        "better there, at 8.25 bits a value."
    )


def test_one_format_is_compared_with_itself_on_the_other_roles() -> None:
    found = scores({"hifp8": (31.0, 30.0, 12.34)})
    found[-1] = score("hifp8", G, 12.34, flush_percent=33.0, underflow_percent=3.0)

    assert said(found) == [
        "hifp8 keeps 12.3 dB or more on activations, weights and gradients, at 8 bits a value; no other format was "
        "measured.",
        "hifp8 without a scale keeps 31.0 dB on activations and 12.3 dB on gradients; 33 % of the values are below its "
        "smallest normal one.",
    ]
    even = said(scores({"mxfp8": (31.0, 31.1, 31.2)}))
    assert len(even) == 1


def test_roles_that_were_not_measured_are_named() -> None:
    found = [score("fp8", A, 31.0), score("mxfp4", A, 18.0)]

    assert said(found) == [
        "fp8 keeps 31.0 dB or more on activations, and no format is better there, at 8 bits a value.",
        "mxfp4 loses 13.0 dB on activations against fp8, at 4.25 bits instead of 8.",
        "No weights or gradients were measured, so nothing is said about them.",
    ]


def test_where_every_format_loses_values_none_is_called_good() -> None:
    found = [
        *(score("fp16", role, None, lost=4096) for role in (A, W, G)),
        *(score("hifp8", role, 20.0, lost=7) for role in (A, W, G)),
    ]

    assert said(found) == [
        "Every format loses values; hifp8 loses the fewest, 21.",
        "fp16 without a scale loses 4,096 of 4,096 values on activations: they become Inf or NaN.",
    ]
    assert said([score("fp16", role, None, lost=4096) for role in (A, W, G)]) == [
        "fp16 is no choice as it is: it loses values.",
        "fp16 without a scale loses 4,096 of 4,096 values on activations: they become Inf or NaN.",
    ]


def test_of_equals_the_one_with_fewer_bits_is_named_then_the_first() -> None:
    equal = (31.0, 31.0, 31.0)

    assert said(scores({"mxfp8": equal, "fp8": equal}))[0].startswith("fp8 keeps 31.0 dB")
    assert said(scores({"hifp8": equal, "fp8": equal}))[0].startswith("hifp8 keeps 31.0 dB")
    assert said(scores({"hifp8": equal, "fp8": equal}))[1] == ("No format is behind another on any role.")


def test_formats_that_measured_fewer_tensors_are_not_compared() -> None:
    short = [score("nvfp4", role, 50.0, records=9) for role in (A, W, G)]

    assert said([*scores({"fp8": (31.0, 31.0, 31.0)}), *short]) == [
        "fp8 keeps 31.0 dB or more on activations, weights and gradients, and no format is better there, at 8 bits a "
        "value.",
        "nvfp4 could not measure every tensor, so no comparison is made there.",
    ]
    apart = [score("fp8", A, 31.0), score("fp8", W, 31.0, records=9), score("nvfp4", W, 20.0)]
    assert said(apart)[0] == (
        "No format took every tensor without losing a value, so none is the best of all."
    )


def test_an_exact_format_is_named_so_and_measures_no_loss() -> None:
    exact = (math.inf, math.inf, math.inf)

    assert said(scores({"bf16": exact, "mxfp8": (31.0, 31.0, 31.0)})) == [
        "bf16 keeps every value of activations, weights and gradients exactly, at 16 bits a value."
    ]
    assert said(scores({"bf16": (math.inf, 40.0, 40.0), "fp16": (40.0, math.inf, 40.0)}))[0] == (
        "bf16 keeps 40.0 dB or more on activations, weights and gradients, at 16 bits a value."
    )


@pytest.mark.parametrize(
    "found", [[], scores({"fp8": (None, None, None)}), scores({"fp8": (1.0, 1.0, 1.0)}, records=0)]
)
def test_nothing_measured_says_nothing(found: list[Score]) -> None:
    assert said(found) == []
