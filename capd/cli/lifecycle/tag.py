"""`capd tag`, `capd pin` and `capd unpin`: mark runs, so that policies and people keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capd.cli.completion import run_words, tag_words
from capd.cli.lifecycle.places import RunsArgument, named_runs
from capd.cli.options import Json, flag
from capd.cli.output import note, print_json, print_lines
from capd.errors import ConfigError
from capd_client.process.text import printable

__all__ = ["pin", "tag", "unpin"]


def tag(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run.", show_default=False, autocompletion=run_words),
    ],
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TAG…]", help="Tags to add.", show_default=False, autocompletion=tag_words),
    ] = None,
    remove: Annotated[bool, flag("--remove", "Remove these tags instead.")] = False,
    as_json: Json = False,
) -> None:
    """Add tags to a run, and print all of them. A job may be capturing into it.

    `capd runs --tag` finds runs by tags, and `capd prune --keep-tag` keeps them.

    \b
    Examples:
      capd tag captures/run.zarr paper ablation-3
      capd tag captures/run.zarr draft --remove
    """
    from capd.lifecycle.marks import tag_run, tags_of

    [place] = named_runs([run])
    words = tags or []
    if remove and not words:
        raise ConfigError("--remove needs tags")
    add, drop = ((), words) if remove else (words, ())
    left = tag_run(place, add, drop) if words else tags_of(place)
    if as_json:
        print_json({"run": str(place), "tags": left})
    else:
        print_lines(map(printable, left))


def pin(runs: RunsArgument, as_json: Json = False) -> None:
    """Pin runs: no command and no policy removes them until `capd unpin`.

    \b
    Examples:
      capd pin captures/run.zarr
    """
    _pin(runs, pinned=True, as_json=as_json)


def unpin(runs: RunsArgument, as_json: Json = False) -> None:
    """Unpin runs.

    \b
    Examples:
      capd unpin captures/run.zarr
    """
    _pin(runs, pinned=False, as_json=as_json)


def _pin(runs: list[str], *, pinned: bool, as_json: bool) -> None:
    from capd.lifecycle.marks import pin_run

    places: list[Path] = named_runs(runs)
    for place in places:
        pin_run(place, pinned=pinned)
        note(f"{place} is {'pinned' if pinned else 'no longer pinned'}")
    if as_json:
        print_json({"pinned" if pinned else "unpinned": [str(place) for place in places]})
