"""The table of `capd stats --drops`: dropped captures by key and reason, from the ranks' ledgers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capd.cli.output import human_count, human_nbytes, table_lines

__all__ = ["drop_lines"]

_HEADER = (
    "reason", "count", "bytes", "iterations", "rank", "layer", "phase", "operation", "tensor", "dtype",
)  # fmt: skip


def drop_lines(drops: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of the drops that `capd.drops.drops_of` returns."""
    if not drops:
        yield "nothing was dropped"
        return
    yield from table_lines(_HEADER, [_cells(drop) for drop in drops], ("count", "bytes", "rank", "layer"))


def _cells(drop: Mapping[str, Any]) -> tuple[str, ...]:
    if drop["rank"] is None:
        return (drop["reason"], human_count(drop["count"]), "", "", "", "", "", "", "(without a key)", "")
    first, last = drop["first_iteration"], drop["last_iteration"]
    place = drop["module"] or ".".join(part for part in (drop["layer_type"], drop["component"]) if part)
    return (
        drop["reason"],
        human_count(drop["count"]),
        human_nbytes(drop["bytes"]),
        str(first) if first == last else f"{first}-{last}",
        str(drop["rank"]),
        "-" if drop["layer"] is None else str(drop["layer"]),
        drop["phase"],
        drop["operation"],
        f"{place}.{drop['tensor_name']}" if place else drop["tensor_name"],
        drop["dtype"],
    )
