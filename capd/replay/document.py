"""The numbers of a replay as one plain document, which docs/json.md describes ("capd replay")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from capd.replay.groups import BY_LAYER, ByRecipe
from capd.replay.recipes import OPERANDS_OF
from capd.replay.replaying import Replayed
from capd.replay.request import ReplayRequest
from capd.replay.sums import BLAMED, ProductSums

__all__ = ["replay_document"]

_MOST_SKIPPED = 1000


def replay_document(
    sources: Sequence[str], request: ReplayRequest, replayed: Replayed, fields: tuple[str, ...]
) -> dict[str, Any]:
    """Return the document of a replay. `fields` are those that the user groups by."""
    groups = replayed.groups
    return {
        "sources": list(sources),
        "operands": "logical" if request.is_logical else "rank",
        "recipes": [
            {"name": one.name, "random": any(map(one.is_random, request.products))} for one in request.recipes
        ],
        "products": list(request.products),
        "draws": request.draws,
        "seed": request.seed,
        "rows": request.rows,
        "calls": {
            "ranks": len(replayed.ranks),
            "found": replayed.found,
            "replayed": replayed.replayed,
            "of_some_rows": replayed.of_some_rows,
            "partial": replayed.partial,
            "left_out": [{"reason": reason, "calls": calls} for reason, calls in replayed.left_out.items()],
        },
        "by": list(fields),
        "all": _recipes(groups.whole()),
        "groups": _groups(fields, groups.by(fields)) if fields else [],
        "layers": _groups(BY_LAYER, groups.by(BY_LAYER)),
        "skipped": [{"name": one.name, "reason": one.reason} for one in replayed.skipped[:_MOST_SKIPPED]],
        "skipped_total": len(replayed.skipped),
    }


def _groups(fields: tuple[str, ...], found: Mapping[tuple[Any, ...], ByRecipe]) -> list[dict[str, Any]]:
    return [
        {**dict(zip(fields, place, strict=True)), "recipes": _recipes(recipes)}
        for place, recipes in found.items()
    ]


def _recipes(found: ByRecipe) -> dict[str, dict[str, Any]]:
    return {
        recipe: {product: _numbers(product, sums) for product, sums in products.items()}
        for recipe, products in found.items()
    }


def _numbers(product: str, sums: ProductSums) -> dict[str, Any]:
    names = dict(zip(BLAMED, (*OPERANDS_OF[product], *BLAMED[2:]), strict=True))
    blame, draws, worst, captured = sums.blame, sums.draws, sums.worst, sums.captured
    return {
        "calls": sums.calls,
        "values": sums.values,
        "nonfinite": sums.nonfinite,
        "lost": sums.lost,
        "sqnr_db": sums.sqnr_db,
        "zeta": sums.zeta,
        "cosine": sums.cosine,
        "alignment": sums.alignment,
        "worst": None if worst is None else worst._asdict(),
        "reference": "+".join(sorted(sums.references)),
        "random": sums.is_random,
        "draws": None if draws is None else {
            "draws": draws.draws,
            "sqnr_db": draws.sqnr_db,
            "gain_db": draws.gain_db,
            "ideal_db": draws.ideal_db,
        },
        "blame": None if blame is None else {names[part]: each for part, each in blame.shares().items()},
        "captured": None if captured is None else asdict(captured),
    }  # fmt: skip
