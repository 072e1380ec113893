"""`capd rm`: removes runs, or series of a run, into the trash, and brings runs back."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import series_paths
from capd.cli.lifecycle.places import RunsArgument, Yes, ask_for, named_runs, released, say_failed
from capd.cli.lifecycle.runs import plain_run, size_column, steps_text, when_text
from capd.cli.options import Json, Wide, flag, option
from capd.cli.output import human_count, human_nbytes, note, print_json, print_lines
from capd.cli.table import Column, print_columns
from capd.errors import CapdError, ConfigError, NothingMatched, StoreError, exit_code_of

if TYPE_CHECKING:
    from capd.lifecycle.inventory import RunFacts

__all__ = ["rm"]


def rm(
    runs: RunsArgument,
    series: Annotated[
        list[str] | None,
        option(
            "--series",
            "GLOB",
            "Remove these series of the run instead. May be repeated.",
            autocompletion=series_paths,
        ),
    ] = None,
    restore: Annotated[bool, flag("--restore", "Bring removed runs back from the trash.")] = False,
    no_trash: Annotated[bool, flag("--no-trash", "Free the space at once. Nothing brings it back.")] = False,
    force_unsynced: Annotated[
        bool, flag("--force-unsynced", "Remove also what is not in the object store, and say what that is.")
    ] = False,
    yes: Yes = False,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Remove runs, or whole series of one run. Without --yes, say what would be removed.

    What is removed goes into the trash of its store, and takes its space until `capd gc` frees it: after seven days, or
    sooner with --all. A run that is live, pinned, of another user, a symbolic link or no run of capd at all is refused.
    In a terminal the command asks for the name of the run instead of --yes.

    A run that is being uploaded, but is not wholly in its object store, is refused without --force-unsynced. The
    objects of an uploaded run stay where they are.

    --series matches paths as `capd ls` prints them, or their ends. Errors of formats that were measured while capturing
    go with their series. The run must be sealed. Its captures then count as never acknowledged, and readers say when
    and by whom the series were removed.

    \b
    Examples:
      capd rm captures/20261126-101500.zarr
      capd rm old-run --yes
      capd rm captures/run.zarr --series "*.backward.*" --yes
      capd rm captures/run.zarr --restore

    \b
    Exit codes:
      5  no series matches
      7  a run is live, or a daemon does not let it go
    """
    places = named_runs(runs)
    if restore:
        if series or no_trash or force_unsynced:
            raise ConfigError("--restore takes runs alone")
        _restore(places, as_json=as_json)
        return
    if series:
        if len(places) != 1:
            raise ConfigError("--series needs one run; give the command once for each")
        _remove_series(places[0], series, yes=yes, no_trash=no_trash, as_json=as_json)
        return
    raise typer.Exit(
        _remove_runs(places, force=force_unsynced, yes=yes, no_trash=no_trash, wide=wide, as_json=as_json)
    )


def _remove_runs(
    places: list[Path], *, force: bool, yes: bool, no_trash: bool, wide: bool, as_json: bool
) -> int:
    from capd.lifecycle.checks import check_held, check_place

    facts: list[RunFacts] = []
    for place in places:
        # One that is refused keeps all of them.
        check_place(place)
        facts.append(check_held(place))
        _check_uploaded(place, facts[-1], force=force)
    if not as_json:
        print_columns(_columns(facts), wide=wide)
    if not yes and not as_json:
        yes = ask_for([one.run_id for one in facts], "run")
    if not yes:
        if as_json:
            print_json({"done": False, "removed": [plain_run(one) for one in facts], "failed": []})
        note(f"nothing removed; --yes removes {human_count(len(facts), 'run')}")
        return 0
    removed, failed = _into_trash(facts, no_trash=no_trash)
    if as_json:
        plain = [plain_run(one) for one in removed]
        print_json({"done": True, "removed": plain, "failed": [str(place) for place, _ in failed]})
    for place, error in failed:
        say_failed(place, error)
    total = human_nbytes(sum(one.nbytes for one in removed))
    way_back = (
        "freed" if no_trash else "moved to the trash; `capd gc` frees it, `capd rm --restore` brings it back"
    )
    if removed:
        note(f"{human_count(len(removed), 'run')} removed, {total} {way_back}")
    errors = [error for _, error in failed]
    return next((exit_code_of(error) if isinstance(error, CapdError) else 1 for error in errors), 0)


def _check_uploaded(run: Path, facts: RunFacts, *, force: bool) -> None:
    """Check that a run that is uploaded is wholly in its object store, or say what is lost."""
    from capd.config import load_daemon_settings
    from capd.lifecycle.uploaded import unsynced

    if not facts.uploaded_to and not load_daemon_settings({}).uploads(run):
        return
    missing = unsynced(run)
    if missing and not force:
        raise StoreError(
            f"{run} is not wholly uploaded, nothing removed: {'; '.join(map(str, missing))}; `capd upload {run}` "
            "brings it there, --force-unsynced removes it anyway"
        )
    for one in missing:
        note(f"{run}: {one}; they are lost when the trash is freed")
    if not missing:
        note(f"{run} stays at {facts.uploaded_to}")


def _into_trash(
    facts: list[RunFacts], *, no_trash: bool
) -> tuple[list[RunFacts], list[tuple[Path, Exception]]]:
    from capd.lifecycle.checks import current_user
    from capd.lifecycle.house_lock import housekeeping
    from capd.lifecycle.trash import entries, finish, free, remove_run

    removed: list[RunFacts] = []
    failed: list[tuple[Path, Exception]] = []
    for one in facts:
        root = one.path.absolute().parent
        try:
            with housekeeping(root):
                entry = remove_run(one.path.absolute(), current_user(), released)
                if no_trash:
                    for found in entries(root):
                        if found.place == entry:
                            free(found)
                removed.append(one)
                # Those that a kill interrupted.
                finish(root, lambda place, error: failed.append((place, error)))
        except (CapdError, OSError) as error:
            failed.append((one.path, error))
    return removed, failed


def _columns(facts: list[RunFacts]) -> list[Column]:
    return [
        Column("run", [one.run_id for one in facts], is_name=True),
        Column("when", [when_text(one.started_s) for one in facts], spare=2),
        Column("state", [one.state for one in facts], spare=1),
        Column("steps", [steps_text(one) for one in facts], spare=3),
        Column("records", [human_count(one.records) for one in facts], right=True),
        size_column(facts),
    ]


def _restore(places: list[Path], *, as_json: bool) -> None:
    from capd.lifecycle.house_lock import housekeeping
    from capd.lifecycle.trash import restore

    for place in places:
        with housekeeping(place.absolute().parent):
            restore(place.absolute())
        note(f"{place} is back")
    if as_json:
        print_json({"restored": [str(place) for place in places]})


def _remove_series(run: Path, globs: list[str], *, yes: bool, no_trash: bool, as_json: bool) -> None:
    from capd.lifecycle.checks import check_held, check_place, current_user
    from capd.lifecycle.house_lock import housekeeping
    from capd.lifecycle.trash import alone_in, entries, free, full_disk_told
    from capd.store.documents.tombstone import Tombstone
    from capd.store.remove.series import remove_series

    check_place(run)
    check_held(run)
    paths = _matching(run, globs)
    if not yes and not as_json:
        print_lines(sorted(paths))
        yes = ask_for(sorted(paths), "series")
    found: dict[str, Any] = {"done": yes, "series": sorted(paths)}
    if yes:
        root = run.absolute().parent
        with housekeeping(root), full_disk_told(root), alone_in(run.absolute(), released):
            gone = remove_series(run.absolute(), sorted(paths), Tombstone.now(current_user()))
        if no_trash:
            with housekeeping(root):
                for entry in entries(root):
                    if entry.place.name == gone.entry:
                        free(entry)
        found |= {"records": gone.records, "stored_bytes": gone.stored_bytes}
    if as_json:
        print_json(found)
    count = f"{len(paths):,} series"
    if not yes:
        note(f"nothing removed; --yes removes {count} of {run}")
    else:
        freed = "freed" if no_trash else "in the trash, which `capd gc` frees"
        note(
            f"{count} with {human_count(gone.records, 'record')} removed, {human_nbytes(gone.stored_bytes)} {freed}"
        )


def _matching(run: Path, globs: list[str]) -> set[str]:
    """Return the paths that the globs match, with those of their errors of formats.

    Raises:
        NothingMatched: A glob matches none.
    """
    from capd.store.measured.error_rows import of_errors
    from capd.store.read.store import open_store

    nodes = open_store(run).nodes
    known = [path for node in nodes for path in node.series]
    found: set[str] = set()
    for glob in globs:
        hits = {
            path for path in known if fnmatchcase(path, glob) or path.endswith(f"/{glob}") or path == glob
        }
        if not hits:
            raise NothingMatched(
                f"no series of {run} matches {glob!r}, nothing removed; `capd ls {run}` lists them"
            )
        found |= hits
    return found | {
        path for node in nodes for path in of_errors(node, (one for one in found if one in node.series))
    }
