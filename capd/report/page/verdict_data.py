"""The verdict in the page's data: the document's, with the places of the worst tensors among the series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capd.analyze.verdict.sentences import sentence_of
from capd.phrase import plain_phrase
from capd.report.page.plain import picked
from capd.report.verdict_document import LEVELS
from capd.strict_json import strict_json

__all__ = ["verdict_data"]

_SHARES = ("lost", "underflow_percent", "saturation_percent")
_OF_TENSOR = ("records", "sqnr_db", *_SHARES)


def verdict_data(verdict: Mapping[str, Any], series: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the verdict of a document. `series`: the series of the page, whose places number their pages."""
    places = {one["path"]: place for place, one in enumerate(series)}
    return {
        "formats": [
            {
                **picked(one, "format", "bits_per_value"),
                **{
                    of: {name: _exact(errors) for name, errors in one[of].items()}
                    for of in ("roles", "products")
                },
            }
            for one in verdict["formats"]
        ],
        "best": verdict["best"],
        "statements": [plain_phrase(sentence_of(one)) for one in verdict["statements"]],
        "worst": [
            {
                **picked(one, "series", "role", "format", *_OF_TENSOR),
                "place": places.get(one["series"]),
            }
            for one in verdict["worst"]
        ],
        "calls": verdict["calls"],
    }


def _exact(errors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of some errors. The page shows three digits, and would round four digits twice."""
    found: dict[str, Any] = strict_json({name: errors[name] for name in (*LEVELS, *_SHARES)})
    return found
