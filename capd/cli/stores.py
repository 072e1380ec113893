"""The run that a reading command means: its STORE argument, `--run`, and the default store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from capd.cli.completion import any_of, run_names, store_paths
from capd.cli.options import option
from capd.cli.output import note
from capd.errors import ConfigError, NotAStore
from capd.store.objects.address import Address, RunPlace, place_of

__all__ = [
    "AttemptOption", "Given", "RunOption", "StoreArgument", "attempt_of", "default_store", "is_run", "resolve_run",
]  # fmt: skip

if TYPE_CHECKING:
    Given: TypeAlias = RunPlace
else:
    # typer knows no unions. `parser=place_of` makes the value.
    Given = Any

StoreArgument = Annotated[
    Given | None,
    typer.Argument(
        metavar="STORE",
        help="A run (NAME.zarr), or a directory of runs: the newest is read. Both may be addresses, as "
        "s3://BUCKET/KEY. Default: CAPD_STORE, or store in capd.toml, or captures.",
        show_default=False,
        parser=place_of,
        autocompletion=store_paths,
    ),
]
RunOption = Annotated[
    str | None, option("--run", "ID", "The run to read, if STORE holds several.", autocompletion=run_names)
]

AttemptOption = Annotated[
    str,
    option(
        "--attempt",
        "N|latest|all",
        "The records of one attempt, or of all; latest: of records at one moment only the newest.",
        autocompletion=any_of("latest", "all"),
    ),
]


def attempt_of(text: str) -> int | str:
    """Return the attempt that `--attempt` names. Raises ConfigError for any other text."""
    if text in ("latest", "all"):
        return text
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise ConfigError(f"--attempt {text!r} is not a number, latest or all")


def default_store() -> Path:
    """Return the directory of runs if none is given: CAPD_STORE, or `store` in capd.toml, or `captures`."""
    from capd.config import load_daemon_settings

    return load_daemon_settings({}).store


def resolve_run(store: RunPlace | None, run: str | None = None) -> RunPlace:
    """Return the run that STORE and `--run` name. If there are several, a note says which one was chosen.

    Raises:
        NotAStore: If there is no such run.
        ConfigError: If STORE is a run, and `--run` names another.
    """
    place = default_store() if store is None else store
    if is_run(place):
        if run is not None and place.name not in (run, f"{run}.zarr"):
            raise ConfigError(f"{place} is a run itself; give its directory to choose with --run {run}")
        return place
    from capd.store.read.store import runs_at

    if isinstance(place, Address) and run is not None:
        # Nothing needs to be listed.
        return place / f"{run.removesuffix('.zarr')}.zarr"
    found = runs_at(place)
    if isinstance(place, Path) and run is not None:
        return _named(place, found, run)
    if not found:
        raise NotAStore(f"no run in {place}; name the store, or capture one with `capd run -- CMD`")
    if len(found) > 1:
        note(f"reading {found[-1]}, the newest of {len(found)} runs; choose another with --run")
    return found[-1]


def is_run(path: RunPlace) -> bool:
    """Return whether `path` is a run, by its name or its Zarr metadata."""
    if isinstance(path, Address):
        return path.is_run
    return path.suffix == ".zarr" or (path / "zarr.json").is_file()


def _named(place: Path, found: Sequence[RunPlace], run: str) -> RunPlace:
    for path in found:
        if path.name in (run, f"{run}.zarr"):
            return path
    from capd.store.documents.tombstone import check_present

    check_present(place / f"{run.removesuffix('.zarr')}.zarr")
    names = ", ".join(path.stem for path in found[-5:]) or "none"
    raise NotAStore(f"no run {run!r} in {place}; the newest runs there: {names}")
