"""The table of `capd stats --drops`: dropped captures by key and reason, from the ranks' ledgers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capd.cli.output import human_count
from capd.cli.table import Column, in_one_unit

__all__ = ["drop_columns"]


def drop_columns(drops: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns of a table of the drops that `capd.drops.drops_of` returns."""
    unit, sizes = in_one_unit([drop["bytes"] or 0 for drop in drops])

    def known(field: str) -> list[str]:
        return ["" if drop["rank"] is None else _text(drop[field]) for drop in drops]

    return [
        Column("reason", [drop["reason"] for drop in drops]),
        Column("count", [human_count(drop["count"]) for drop in drops], right=True),
        Column(unit, ["" if drop["rank"] is None else size for drop, size in zip(drops, sizes, strict=True)],
               right=True, spare=1),
        Column("iterations", ["" if drop["rank"] is None else _iterations(drop) for drop in drops]),
        Column("rank", known("rank"), right=True),
        Column("layer", known("layer"), right=True, spare=2),
        Column("phase", known("phase"), spare=4),
        Column("operation", known("operation"), spare=5),
        Column("tensor", [_tensor(drop) for drop in drops], is_name=True),
        Column("dtype", known("dtype"), spare=3),
    ]  # fmt: skip


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _iterations(drop: Mapping[str, Any]) -> str:
    first, last = drop["first_iteration"], drop["last_iteration"]
    return str(first) if first == last else f"{first}-{last}"


def _tensor(drop: Mapping[str, Any]) -> str:
    if drop["rank"] is None:
        return "(without a key)"
    place = drop["module"] or ".".join(part for part in (drop["layer_type"], drop["component"]) if part)
    return f"{place}.{drop['tensor_name']}" if place else str(drop["tensor_name"])
