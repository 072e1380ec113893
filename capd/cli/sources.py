"""The records of commands that read whole runs, and the loop over these records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from capd.cli.options import flag, option
from capd.cli.output import note
from capd.cli.progress import progress_bar
from capd.cli.selection import Tests
from capd.cli.stores import is_run, resolve_run
from capd.errors import ConfigError, NothingMatched

if TYPE_CHECKING:
    from capd.io.items import Items
    from capd.report.gather import GatheredRecords

__all__ = [
    "AllRuns",
    "LayerBase",
    "Sources",
    "Workers",
    "found_in",
    "gather_shown",
    "holds_files",
    "threads_of",
]  # fmt: skip

AllRuns = Annotated[bool, flag("--all-runs", "Read all runs in STORE together, not only the newest.")]
LayerBase = Annotated[
    int,
    option(
        "--layer-base", "0|1", "Number of the first layer in .pt files that capd did not write.", min=0, max=1
    ),
]
Workers = Annotated[
    int | None, option("--workers", "N", "Threads that read [default: the CPUs].", min=1, max=256)
]


class Sources(NamedTuple):
    """The records to read. `sources` are their runs or directory; `files` says whether they are tensor files."""

    sources: list[str]
    items: Items
    files: bool


def found_in(place: Path, run: str | None, all_runs: bool, tests: Tests, layer_base: int) -> Sources:
    """Find the records to read: of the newest run in a directory, of one run, of all runs, or of tensor files.

    Args:
        place: A run, a directory of runs, or a directory of tensor files.
        run: The name of the run to read, None for the newest.
        all_runs: Whether to read all runs together.
        tests: Tests that a series must pass.
        layer_base: The number of the first layer in files that capd did not write.

    Raises:
        NothingMatched: If no series passes the tests. Tensor files are tested only when they are loaded.
    """
    from capd.io.items import items_of_files, items_of_runs

    if holds_files(place):
        items = items_of_files(place, tests, layer_base)
        if items.total:
            return Sources([str(place)], items, files=True)
    paths = _runs(place, run, all_runs)
    items = items_of_runs(paths, tests)
    sources = [str(path) for path in paths]
    if not items.total:
        why = " matches the selection" if tests else " yet"
        raise NothingMatched(f"no series in {', '.join(sources)}{why}")
    return Sources(sources, items, files=False)


def _runs(place: Path, run: str | None, all_runs: bool) -> list[Path]:
    if any(place.glob("*/*.pt")):
        note(f"{place} also has tensor files, which are not read; `capd import` reads them into a run")
    if not all_runs:
        return [resolve_run(place, run)]
    if run is not None:
        raise ConfigError("--run names one run and --all-runs takes all of them; give one of the two")
    from capd.store.read.store import runs

    return ([] if is_run(place) else list(runs(place))) or [resolve_run(place)]


def holds_files(place: Path) -> bool:
    """Return whether `place` can only be a directory of tensor files: it is not a run and contains none."""
    return place.is_dir() and not is_run(place) and not any(place.glob("*.zarr/zarr.json"))


def threads_of(workers: int | None) -> int:
    """Return the number of threads: `workers`, or one for each CPU."""
    from capd.server.limits import usable_cpus

    return workers or max(1, round(usable_cpus()))


def gather_shown(items: Items, gathered: GatheredRecords, workers: int | None, **asked: Any) -> None:
    """Gather all items with a progress bar, and name skipped ones. `asked`: further arguments of `gather`."""
    from capd.report.gather import Skipped, gather

    with progress_bar(items.total, "records") as progress:
        for seen in gather(items.found, gathered, threads=threads_of(workers), **asked):
            if isinstance(seen, Skipped):
                progress.say(f"skipped {seen.name}: {seen.reason}")
            progress.add(0 if isinstance(seen, Skipped) else seen)
