"""The verdict as plain values: JSON, text and page show the same. docs/json.md describes its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.verdict.roles import ROLES
from capd.analyze.verdict.score import best_of, score_of
from capd.analyze.verdict.sentences import sentence_of
from capd.analyze.verdict.statements import statements_of
from capd.report.format_errors import error_numbers
from capd.report.gather import GatheredRecords
from capd_client.process.text import human_count

__all__ = ["MOST_WORST", "WORST_NUMBERS", "calls_text", "percent_of", "verdict_document", "verdict_rows"]

MOST_WORST = 10
WORST_NUMBERS = ("records", "count", "lost", "sqnr_db", "underflow_percent", "saturation_percent")


def verdict_document(gathered: GatheredRecords, choices: Sequence[FormatChoice]) -> dict[str, Any]:
    """Return the verdict on the measured formats, with unrounded floats. `formats` is empty if nothing was measured."""
    roles = gathered.verdict.roles
    scores = [
        score_of(choice, role, roles[role][choice.label])
        for choice in choices
        for role in ROLES
        if choice.label in roles.get(role, {})
    ]
    measured = dict.fromkeys(one.label for one in scores)
    best = {role: label for role in ROLES if (label := best_of(roles.get(role, {}))) is not None}
    statements = statements_of(scores)
    return {
        "formats": [_format(gathered, choice) for choice in choices if choice.label in measured],
        "best": best,
        "statements": [{**one, "text": sentence_of(one)} for one in statements],
        "worst": list(
            _worst(gathered, {role: best.get(role, next(iter(errors))) for role, errors in roles.items()})
        ),
        "calls": _calls(gathered),
    }


def _format(gathered: GatheredRecords, choice: FormatChoice) -> dict[str, Any]:
    roles, products, spec = gathered.verdict.roles, gathered.products, choice.spec
    return {
        "format": choice.label,
        "bits_per_value": spec.bits_per_value,
        "scaled": spec.is_scaled,
        "roles": _numbers({role: roles[role].get(choice.label) for role in ROLES if role in roles}),
        "products": _numbers({} if products is None else products.errors.get(choice.label, {})),
    }


def _numbers(errors: Mapping[str, Errors | None]) -> dict[str, Any]:
    return {name: error_numbers(one) for name, one in errors.items() if one is not None}


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
    return {"found": found.calls, "measured": found.measured, "left_out": found.left_out}


def verdict_rows(
    verdict: Mapping[str, Any],
) -> Iterator[tuple[str, Mapping[str, Any], bool, Mapping[str, Any]]]:
    """Yield each format on each role or product: the name of that, the format, whether it is best, and its errors."""
    for one in verdict["formats"]:
        for name, errors in (*one["roles"].items(), *one["products"].items()):
            yield name, one, verdict["best"].get(name) == one["format"], errors


def calls_text(calls: Mapping[str, int]) -> str:
    """Describe how many calls the products are of, such as "32 of 52 calls of linear layers"."""
    left_out = f"; {human_count(calls['left_out'])} cannot be measured" if calls["left_out"] else ""
    return f"{human_count(calls['measured'])} of {human_count(calls['found'], 'call')} of linear layers{left_out}"


def percent_of(one: Mapping[str, Any], name: str) -> float | None:
    """Return the largest share of a format on any role: `name` is "underflow_percent" or another metric of errors."""
    found = [errors[name] for errors in one["roles"].values() if errors[name] is not None]
    return max(found, default=None)
