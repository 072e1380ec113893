"""`capd ls`: lists the series of a run, filtered, as a table or JSON, or counts them by a field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import any_of
from capd.cli.options import Json, Wide, flag, grouped, option
from capd.cli.output import human_count, human_nbytes, note, print_json
from capd.cli.selection import KeyOptions
from capd.cli.stores import AttemptOption, RunOption, StoreArgument, attempt_of, resolve_run
from capd.cli.table import Column, in_one_unit, print_columns
from capd.errors import ConfigError
from capd_client.process.text import human_value

if TYPE_CHECKING:
    from capd.store.read.store import SeriesListing

__all__ = ["FIELDS", "ls"]

FIELDS = (
    "path", "quant_type", "rank", "layer", "phase", "layer_type", "operation", "component", "tensor_name",
    "module", "stack", "dtype", "shape", "records", "raw_bytes", "stored_bytes", "kept",
)  # fmt: skip
SORTABLE = ("records", "raw_bytes", "stored_bytes")
COUNTABLE = (*FIELDS[1:12], "kept")


@grouped
def ls(
    store: StoreArgument = None,
    run: RunOption = None,
    *,
    keys: KeyOptions,
    limit: Annotated[
        int | None, option("--limit", "N", "Print at most this many [default: all].", min=1)
    ] = None,
    attempt: AttemptOption = "latest",
    by: Annotated[
        str | None,
        option(
            "--by",
            "FIELD",
            f"Count series, records and bytes by: {', '.join(COUNTABLE)}.",
            autocompletion=any_of(*COUNTABLE),
        ),
    ] = None,
    wide: Wide = False,
    scalars: Annotated[
        bool, flag("--scalars", "List the scalars instead: loss, gradient norm, and what the job recorded.")
    ] = False,
    sort: Annotated[
        str | None,
        option("--sort", "FIELD", f"Largest first: {', '.join(SORTABLE)}.", autocompletion=any_of(*SORTABLE)),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the series of a run, or count them by a field. A run without tensors lists its scalars.

    \b
    Examples:
      capd ls captures --layer 0-3 --tensor grad_output
      capd ls captures --module "*.mlp.*" --json
      capd ls captures --by quant_type
      capd ls captures --scalars

    \b
    Exit codes:
      4  a scalar cannot be read
      5  nothing matches
    """
    if by is not None and by not in COUNTABLE:
        raise ConfigError(f"--by {by!r} is not a field; use one of {', '.join(COUNTABLE)}")
    if sort is not None and sort not in SORTABLE:
        raise ConfigError(f"--sort {sort!r} is not a field; use one of {', '.join(SORTABLE)}")
    if scalars and (by is not None or sort is not None):
        raise ConfigError("--by and --sort mean nothing for --scalars")
    from capd.store.read.store import list_series, open_store

    path, tests = resolve_run(store, run), keys.tests()
    opened = open_store(path)
    everything = list_series(opened, attempt_of(attempt))
    names = opened.scalars()
    if scalars or (names and not everything and not tests and not as_json and by is None and sort is None):
        from capd.cli.store.scalar_tables import list_scalars

        if not scalars:
            note(f"{path} has no tensors, only scalars")
        raise typer.Exit(list_scalars(opened, tests, limit, attempt_of(attempt), wide=wide, as_json=as_json))
    found = [row for row in everything if all(test(row) for test in tests)]
    for gone in opened.removed:
        note(
            f"{human_count(len(gone.paths))} series with {human_count(gone.records, 'record')} were {gone.mark}"
        )
    if not found:
        if as_json:
            print_json([])
        raise keys.nothing_in(str(path), everything)
    found.sort(key=_order)
    items = [_plain(row) for row in found] if by is None else _count_by(found, by)
    if sort is not None:
        items.sort(key=lambda item: item[sort], reverse=True)
    if limit is not None and len(items) > limit:
        note(f"showing {limit} of {len(items):,}; raise --limit for more")
    if as_json:
        print_json(items[:limit])
        return
    shown = items[:limit]
    print_columns([*(_of_series(shown) if by is None else _of_counts(shown, by)), *_totals(shown)], wide=wide)
    note(_summary(path.name, found))
    if names:
        note(f"{human_count(len(names), 'scalar')} beside them: `capd ls {path} --scalars`")


def _order(row: SeriesListing) -> tuple[Any, ...]:
    layer = math.inf if row.layer is None else row.layer
    return row.quant_type, row.rank, row.stack, layer, row.module, row.operation, row.phase, row.path


def _plain(row: SeriesListing) -> dict[str, Any]:
    # dataclasses.asdict copies deeply, which would take half of the time of a long listing.
    plain = {field: getattr(row, field) for field in FIELDS}
    return {**plain, "shape": list(row.shape)}


def _count_by(rows: Iterable[SeriesListing], field: str) -> list[dict[str, Any]]:
    groups: dict[Any, dict[str, Any]] = {}
    for row in rows:
        value = getattr(row, field)
        group = groups.setdefault(
            value, {field: value, "series": 0, "records": 0, "raw_bytes": 0, "stored_bytes": 0}
        )
        group["series"] += 1
        for total in ("records", "raw_bytes", "stored_bytes"):
            group[total] += getattr(row, total)
    return sorted(groups.values(), key=lambda group: (group[field] is None, group[field]))


def _of_series(items: Sequence[dict[str, Any]]) -> list[Column]:
    shapes = ["×".join(map(str, item["shape"][1:])) or "scalar" for item in items]
    kept = [item["kept"] for item in items]
    return [
        Column("path", [item["path"] for item in items], is_name=True),
        Column("dtype", [item["dtype"] for item in items], spare=2),
        Column("shape", shapes, spare=1),
        Column("kept", kept, spare=4),
    ]


def _of_counts(items: Sequence[dict[str, Any]], field: str) -> list[Column]:
    return [
        Column(field, [human_value(item[field]) for item in items], is_name=True),
        Column("series", [human_count(item["series"]) for item in items], right=True),
    ]


def _totals(items: Sequence[dict[str, Any]]) -> list[Column]:
    columns = [Column("records", [human_count(item["records"]) for item in items], right=True)]
    for name, spare in (("raw", 3), ("stored", 0)):
        unit, sizes = in_one_unit([item[f"{name}_bytes"] for item in items])
        columns.append(Column(f"{name} {unit}", sizes, right=True, spare=spare))
    return columns


def _summary(name: str, rows: Sequence[SeriesListing]) -> str:
    records, raw, stored = (
        sum(getattr(row, f) for row in rows) for f in ("records", "raw_bytes", "stored_bytes")
    )
    sizes = f"{human_nbytes(raw)} raw, {human_nbytes(stored)} stored"
    ratio = f", ratio {raw / stored:.2f}" if stored else ""
    return f"{name}: {len(rows):,} series, {records:,} records, {sizes}{ratio}"
