"""`capd gc`: frees the trash, quarantines and leftovers of kills."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.lifecycle.places import RootArgument, Yes, root_of, say_failed
from capd.cli.lifecycle.runs import when_text
from capd.cli.options import Json, Wide, flag
from capd.cli.output import human_nbytes, note, print_json
from capd.cli.table import Column, in_one_unit, print_columns

if TYPE_CHECKING:
    from capd.lifecycle.spare import Spare

__all__ = ["gc"]


def gc(
    store: RootArgument = None,
    everything: Annotated[
        bool, flag("--all", "Free also what has been in the trash for less than seven days.")
    ] = False,
    yes: Yes = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Free the space of what nobody needs any more. Without --yes, list it.

    It is: removed runs and series that have been in the trash for seven days; quarantines, where recovery and repair
    put files that they could not read; temporary files that a kill left. Files with records are never freed:
    unsealed records stay for the next daemon. A run that a daemon has open is left alone.

    \b
    Examples:
      capd gc
      capd gc captures --all --yes
    """
    from capd.lifecycle.checks import check_root
    from capd.lifecycle.house_lock import housekeeping
    from capd.lifecycle.spare import free_spare, spare_in

    root = root_of(store).absolute()
    check_root(root)
    failed: list[tuple[Path, Exception]] = []
    found = spare_in(root, everything=everything)
    freed = 0
    if yes:
        with housekeeping(root):
            found = spare_in(root, everything=everything)
            freed = free_spare(root, found, lambda place, error: failed.append((place, error)))
    if as_json:
        print_json(_plain(found, yes, failed, freed))
    elif found:
        print_columns(_columns(found), wide=wide)
    for place, error in failed:
        say_failed(place, error)
    due = sum(one.nbytes for one in found if one.is_due)
    waiting = sum(one.nbytes for one in found if not one.is_due)
    later = (
        f"; {human_nbytes(waiting)} in the trash for less than seven days stay, --all frees them"
        if waiting
        else ""
    )
    note(
        f"{human_nbytes(freed)} freed{later}"
        if yes
        else f"nothing freed; --yes frees {human_nbytes(due)}{later}"
    )
    raise typer.Exit(1 if failed else 0)


def _columns(found: list[Spare]) -> list[Column]:
    unit, sizes = in_one_unit([one.nbytes for one in found])
    return [
        Column("what", [one.what for one in found]),
        Column("run", [one.run for one in found], is_name=True),
        Column(unit, sizes, right=True),
        Column("since", [when_text(one.since_s) for one in found], spare=1),
        Column("frees", [_when(one) for one in found]),
    ]


def _when(one: Spare) -> str:
    if one.is_due:
        return "now"
    return f"in {max(1, round((one.due_s - time.time()) / 86_400))} d"


def _plain(found: list[Spare], yes: bool, failed: list[tuple[Path, Exception]], freed: int) -> dict[str, Any]:
    spare = [
        {
            "what": one.what,
            "run": one.run,
            "path": str(one.place),
            "bytes": one.nbytes,
            "since": one.since_s,
            "due": one.is_due,
        }
        for one in found
    ]
    return {"done": yes, "found": spare, "freed_bytes": freed, "failed": [str(place) for place, _ in failed]}
