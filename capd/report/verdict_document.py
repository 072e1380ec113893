"""The verdict as plain values: JSON, text and page show the same. docs/json.md describes its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from capd.analyze.format_choice import FormatChoice
from capd.analyze.verdict.levels import Levels
from capd.analyze.verdict.score import RoleScores
from capd.analyze.verdict.sentences import sentence_of
from capd.analyze.verdict.statements import statements_of
from capd.phrase import phrase_text
from capd.report.format_errors import error_numbers
from capd.report.gather import GatheredRecords
from capd_client.process.text import human_count

__all__ = [
    "LEVELS",
    "MOST_WORST",
    "WORST_NUMBERS",
    "calls_text",
    "percent_of",
    "verdict_document",
    "verdict_rows",
]

LEVELS = ("tensors", "tenth_sqnr_db", "median_sqnr_db", "tenth_sqnr_db_error")
"""The numbers of a distribution over tensors, or over calls."""
MOST_WORST = 10
WORST_NUMBERS = ("records", "count", "lost", "sqnr_db", "underflow_percent", "saturation_percent")


def verdict_document(gathered: GatheredRecords, choices: Sequence[FormatChoice]) -> dict[str, Any]:
    """Return the verdict on the measured formats, with unrounded floats. `formats` is empty if nothing was measured."""
    roles = gathered.verdict.scored(choices)
    statements = statements_of(roles)
    best = {one.role: one.best for one in roles}
    first = {one.role: one.first.label for one in roles if one.first is not None}
    formats = [_format(gathered, choice, roles) for choice in choices]
    return {
        "formats": [one for one in formats if one["roles"]],
        "best": {role: label for role, label in best.items() if label is not None},
        "statements": [{**one, "text": phrase_text(sentence_of(one))} for one in statements],
        "worst": list(_worst(gathered, first)),
        "calls": _calls(gathered),
    }


def _format(gathered: GatheredRecords, choice: FormatChoice, roles: Sequence[RoleScores]) -> dict[str, Any]:
    products, spec, label = gathered.products, choice.spec, choice.label
    scores = {
        role.role: score for role in roles for score in role.scores if score.label == label and score.taken
    }
    return {
        "format": label,
        "bits_per_value": spec.bits_per_value,
        "scaled": spec.is_scaled,
        "roles": {
            role: {**_level_numbers(score.levels), **error_numbers(gathered.verdict.roles[role][label])}
            for role, score in scores.items()
        },
        "products": {
            name: {**_level_numbers(one.levels), **error_numbers(one.errors)}
            for name, one in ({} if products is None else products.of(label)).items()
        },
    }


def _level_numbers(levels: Levels | None) -> dict[str, Any]:
    """Return LEVELS, None without a tensor or call that has an SQNR."""
    if levels is None:
        return {**dict.fromkeys(LEVELS), "tensors": 0}
    return dict(
        zip(LEVELS, (levels.tensors, levels.tenth_db, levels.median_db, levels.error_db), strict=True)
    )


def _worst(gathered: GatheredRecords, formats: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for key, path, role, error in gathered.verdict.worst(formats, MOST_WORST):
        yield {
            "series": path,
            **msgspec.structs.asdict(key),
            "role": role,
            "format": formats[role],
            **{name: getattr(error, name) for name in WORST_NUMBERS},
        }


def _calls(gathered: GatheredRecords) -> dict[str, int] | None:
    found = gathered.products
    if found is None:
        return None
    return {
        "found": found.calls,
        "measured": found.measured,
        "partial": found.partial,
        "left_out": found.left_out,
    }


def verdict_rows(
    verdict: Mapping[str, Any],
) -> Iterator[tuple[str, Mapping[str, Any], bool, Mapping[str, Any]]]:
    """Yield each format on each role or product: the name of that, the format, whether it is best, and its errors."""
    for one in verdict["formats"]:
        for name, errors in (*one["roles"].items(), *one["products"].items()):
            yield name, one, verdict["best"].get(name) == one["format"], errors


def calls_text(verdict: Mapping[str, Any]) -> str:
    """Describe how many calls the products are of, such as "32 of 52 calls of linear layers"."""
    calls = verdict["calls"]
    text = f"{human_count(calls['measured'])} of {human_count(calls['found'], 'call')} of linear layers"
    if calls["left_out"]:
        text += f"; {human_count(calls['left_out'])} cannot be measured"
    if calls["partial"]:
        text += f"; {human_count(calls['partial'])} are slices of tokens, without dW"
    along = [one["format"] for one in verdict["formats"] if not one["products"]] if calls["measured"] else []
    return f"{text}; none in {', '.join(along)}, because its axis is chosen" if along else text


def percent_of(one: Mapping[str, Any], name: str) -> float | None:
    """Return the largest share of a format on any role: `name` is "underflow_percent" or another metric of errors."""
    found = [errors[name] for errors in one["roles"].values() if errors[name] is not None]
    return max(found, default=None)
