"""The replay in the page's data: the numbers of its document that the page shows, of a bounded number of modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capd.report.page.group_data import Notes
from capd.report.page.plain import rounded

__all__ = ["replay_data"]

_MOST_MODULES = 2000
_OF_PRODUCT = ("sqnr_db", "zeta", "alignment", "cosine", "worst", "draws", "blame", "captured")


def replay_data(plain: Mapping[str, Any], notes: Notes) -> dict[str, Any] | None:
    """Return the replay of a report's document; None without one."""
    found = plain["replay"]
    if found is None:
        return None
    groups = found["groups"]
    if len(groups) > _MOST_MODULES:
        notes.append({"about": "replay", "found": len(groups), "shown": _MOST_MODULES})
    return {
        "operands": found["operands"],
        "recipes": found["recipes"],
        "products": found["products"],
        "calls": {name: found["calls"][name] for name in ("found", "replayed")},
        "all": _picked(found["all"]),
        "layers": [_group(one) for one in found["layers"]],
        "groups": [_group(one) for one in groups[:_MOST_MODULES]],
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**group, "recipes": _picked(group["recipes"])}


def _picked(recipes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    return {
        recipe: {
            product: {name: rounded(numbers[name]) for name in _OF_PRODUCT}
            for product, numbers in products.items()
        }
        for recipe, products in recipes.items()
    }
