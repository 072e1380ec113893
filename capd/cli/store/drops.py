"""`capd stats --drops`: lists dropped captures by key and reason, from the ranks' ledgers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from capd.cli.output import human_count, human_nbytes, table_lines
from capd.drops import BY_CHOICE

if TYPE_CHECKING:
    from capd.store.catalog.rows import LedgerRow, SessionRow

__all__ = ["Drop", "drop_lines", "drops_of"]


class Drop(BaseModel):
    """Drops of one key and dtype for one reason, over all sessions of the run.

    Drops without a key have rank None: they were dropped before they had one, or lost with a killed rank.

    Attributes:
        bytes: The bytes of the dropped captures, as far as their sizes were known.
        first_iteration: The first iteration with such a drop.
        last_iteration: The last iteration with such a drop.
    """

    model_config = ConfigDict(extra="forbid")

    reason: str
    count: int
    bytes: int = 0
    first_iteration: int | None = None
    last_iteration: int | None = None
    quant_type: str = ""
    rank: int | None = None
    layer: int | None = None
    phase: str = ""
    layer_type: str = ""
    operation: str = ""
    component: str = ""
    tensor_name: str = ""
    module: str = ""
    stack: str = ""
    dtype: str = ""


def drops_of(sessions: Iterable[SessionRow]) -> list[Drop]:
    """Return all drops, the most frequent first and chosen ones last. Their counts add up to the counters."""
    found: dict[object, LedgerRow] = {}
    keyless: Counter[str] = Counter()
    for session in sessions:
        keyless.update(session.dropped)
        for row in session.drops:
            keyless[row.reason] -= row.count
            identity = (row.key, row.dtype, row.reason)
            found[identity] = _together(found[identity], row) if identity in found else row
    drops = [_drop(row) for row in found.values()]
    drops += [Drop(reason=reason, count=count) for reason, count in keyless.items() if count > 0]
    return sorted(drops, key=lambda drop: (drop.reason in BY_CHOICE, -drop.count, drop.reason, str(drop)))


def _together(a: LedgerRow, b: LedgerRow) -> LedgerRow:
    return replace(
        a,
        count=a.count + b.count,
        nbytes=a.nbytes + b.nbytes,
        first_iteration=min(a.first_iteration, b.first_iteration),
        last_iteration=max(a.last_iteration, b.last_iteration),
    )


def _drop(row: LedgerRow) -> Drop:
    return Drop(
        reason=row.reason,
        count=row.count,
        bytes=row.nbytes,
        dtype=row.dtype,
        first_iteration=row.first_iteration,
        last_iteration=row.last_iteration,
        **{name: getattr(row.key, name) for name in row.key.__struct_fields__},
    )


def drop_lines(drops: list[Drop]) -> Iterator[str]:
    """Yield the lines of a table for people."""
    if not drops:
        yield "nothing was dropped"
        return
    header = (
        "reason",
        "count",
        "bytes",
        "iterations",
        "rank",
        "layer",
        "phase",
        "operation",
        "tensor",
        "dtype",
    )
    yield from table_lines(
        header, [_cells(drop) for drop in drops], right=("count", "bytes", "rank", "layer")
    )


def _cells(drop: Drop) -> tuple[str, ...]:
    if drop.rank is None:
        return (drop.reason, human_count(drop.count), "", "", "", "", "", "", "(without a key)", "")
    first, last = drop.first_iteration, drop.last_iteration
    place = drop.module or ".".join(part for part in (drop.layer_type, drop.component) if part)
    return (
        drop.reason,
        human_count(drop.count),
        human_nbytes(drop.bytes),
        str(first) if first == last else f"{first}-{last}",
        str(drop.rank),
        "-" if drop.layer is None else str(drop.layer),
        drop.phase,
        drop.operation,
        f"{place}.{drop.tensor_name}" if place else drop.tensor_name,
        drop.dtype,
    )
