"""`capd runs`: lists the runs of a store root: when, state, steps, records, size, quant types, command."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import store_roots, tag_words
from capd.cli.lifecycle.places import root_of
from capd.cli.options import Json, Wide, option
from capd.cli.output import human_count, human_nbytes, note, print_json
from capd.cli.stores import Given
from capd.cli.table import Column, in_one_unit, print_columns
from capd.errors import ConfigError, NotAStore
from capd.store.objects.address import Address, RunPlace, place_of

if TYPE_CHECKING:
    from capd.lifecycle.inventory import RunSummary

__all__ = ["plain_run", "runs", "size_column", "steps_text", "when_text"]


def runs(
    store: Annotated[
        Given | None,
        typer.Argument(
            metavar="[STORE]",
            help="The directory of runs, or its address, as s3://BUCKET/PREFIX. Default: CAPD_STORE, or store in "
            "capd.toml, or captures.",
            show_default=False,
            parser=place_of,
            autocompletion=store_roots,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None,
        option("--tag", "TAG", "Only runs with this tag. May be repeated.", autocompletion=tag_words),
    ] = None,
    limit: Annotated[int | None, option("--limit", "N", "Only the newest N [default: all].", min=1)] = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """List the runs of a directory, the oldest first.

    The state is live (a rank captures, or may come back), open (a daemon has it open, nobody captures), unsealed (a
    daemon was killed; the next one seals it), sealed, removing (a removal was interrupted) or unreadable.

    The size is what a run takes on this disk. `moved` is what `[upload] delete_local` left in the object store alone.

    \b
    Examples:
      capd runs
      capd runs captures --tag paper --json

    \b
    Exit codes:
      5  no run has these tags
    """
    from capd.errors import NothingMatched
    from capd.lifecycle.inventory import inventory

    found: Sequence[RunSummary]
    root: RunPlace
    if isinstance(store, Address):
        from capd.lifecycle.remote_inventory import remote_inventory

        if store.is_run:
            raise ConfigError(f"{store} is a run; name the prefix of its runs: {store.parent}")
        root, found = store, remote_inventory(store)
    else:
        root = root_of(store)
        if not root.is_dir():
            raise NotAStore(f"{root} is no directory; name a directory of runs")
        found = inventory(root)
    if tag and found:
        found = [one for one in found if set(tag) <= set(one.tags)]
        if not found and not as_json:
            raise NothingMatched(
                f"no run in {root} has the tags {', '.join(tag)}; `capd runs {root}` lists all"
            )
    shown = found[-limit:] if limit is not None else found
    if as_json:
        print_json([plain_run(one) for one in shown])
        return
    if not shown:
        raise NotAStore(f"no run in {root}; name the store, or capture one with `capd run -- CMD`")
    print_columns(_columns(shown), wide=wide)
    for one in shown:
        if one.state in ("unreadable", "removing"):
            note(
                f"{one.path}: {one.problem or 'its removal was interrupted; the next `capd rm` completes it'}"
            )
    total = sum(one.nbytes for one in found)
    count = human_count(len(found), "run")
    note(f"{count} in {root}, {human_nbytes(total)}; `capd ls RUN` lists the tensors of one")


def _columns(found: Sequence[RunSummary]) -> list[Column]:
    return [
        Column("run", [one.run_id for one in found], is_name=True),
        Column("when", [when_text(one.started_s) for one in found], spare=2),
        Column("state", [f"{one.state}{', pinned' if one.is_pinned else ''}" for one in found]),
        Column("steps", [steps_text(one) for one in found], spare=1),
        Column("records", [human_count(one.records) for one in found], right=True, spare=3),
        size_column(found),
        Column("types", [",".join(one.quant_types) or "-" for one in found], spare=5),
        Column("tags", [",".join(one.tags) or "-" for one in found], spare=6),
        *_uploads(found),
        Column("command", [one.command or "-" for one in found], spare=7),
    ]


def _uploads(found: Sequence[RunSummary]) -> list[Column]:
    """Return the columns about object stores, if a run is uploaded."""
    columns = []
    if any(one.moved_bytes for one in found):
        unit, sizes = in_one_unit([one.moved_bytes for one in found])
        columns.append(Column(f"moved {unit}", sizes, right=True, spare=2))
    if any(one.uploaded_to for one in found):
        columns.append(Column("uploaded to", [one.uploaded_to or "-" for one in found], spare=4))
    return columns


def size_column(found: Sequence[RunSummary]) -> Column:
    """Return the sizes of runs in one unit."""
    unit, sizes = in_one_unit([one.nbytes for one in found])
    return Column(unit, sizes, right=True)


def when_text(time_s: float) -> str:
    """Return a time for people, in the zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


def steps_text(one: RunSummary) -> str:
    """Return the range of captured iterations."""
    if one.first_iteration is None:
        return "-"
    if one.first_iteration == one.last_iteration:
        return str(one.first_iteration)
    return f"{one.first_iteration}-{one.last_iteration}"


def plain_run(one: RunSummary) -> dict[str, Any]:
    """Return a run as JSON."""
    return {
        "run": one.run_id,
        "path": str(one.path),
        "started": one.started_s,
        "ended": one.ended_s,
        "state": one.state,
        "first_iteration": one.first_iteration,
        "last_iteration": one.last_iteration,
        "records": one.records,
        "raw_bytes": one.raw_bytes,
        "stored_bytes": one.stored_bytes,
        "size": one.nbytes,
        "quant_types": one.quant_types,
        "ranks": one.ranks,
        "nodes": one.nodes,
        "command": one.command,
        "tags": list(one.tags),
        "pinned": one.is_pinned,
        "problem": one.problem,
        "uploaded_to": one.uploaded_to,
        "moved_bytes": one.moved_bytes,
    }
