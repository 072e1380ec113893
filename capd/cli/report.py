"""`capd report`: statistics and figures of a run, of several, or of a directory of tensor files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from capd.cli.output import human_count, human_nbytes, note, print_json, print_lines
from capd.cli.progress import progress_bar
from capd.cli.selection import (
    Components,
    LayerRange,
    LayerTypes,
    Modules,
    Operations,
    Phases,
    QuantTypes,
    RankRange,
    Tensors,
    key_filters,
)
from capd.cli.stores import RunOption, StoreArgument, default_store, is_run, resolve_run
from capd.errors import CapdError, ConfigError, DamagedRecord, NothingMatched

if TYPE_CHECKING:
    from capd.io.items import Items
    from capd.report.directory import ReportDirectory
    from capd.report.gather import Gathered

__all__ = ["report"]

JSON_NAME, TEXT_NAME = "global_statistics.json", "global_statistics_report.txt"
Tests = Sequence[Callable[[Any], bool]]


def report(
    store: StoreArgument = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Where the files go.", show_default=False)
    ] = ...,  # type: ignore[assignment]  # typer's way to say that it is required
    run: RunOption = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="All runs in STORE together, not the newest alone.")
    ] = False,
    layer_base: Annotated[
        int, typer.Option(min=0, max=1, help="Number of the first layer in files that capd did not write.")
    ] = 0,
    quant_type: QuantTypes = None,
    rank: RankRange = None,
    layer: LayerRange = None,
    phase: Phases = None,
    layer_type: LayerTypes = None,
    component: Components = None,
    operation: Operations = None,
    tensor: Tensors = None,
    module: Modules = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="Threads that read [default: the CPUs].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Stored statistics alone; reads no tensor of a run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write statistics (JSON, text) and figures (PNG; extra `plot`) of a run into DIR.

    STORE may also be a directory of the predecessor's .pt files, read in place. What cannot be read is named and
    skipped (exit code 4 for a damaged record, 1 for a bad file). Exits with 5 when nothing matches.
    """
    tests = key_filters(
        quant_type=quant_type, rank=rank, layer=layer, phase=phase, layer_type=layer_type, component=component,
        operation=operation, tensor=tensor, module=module,
    )  # fmt: skip
    from capd.report.directory import opened

    place = default_store() if store is None else store
    found = _found(place, run, all_runs, tests, layer_base)
    with opened(out, (JSON_NAME, TEXT_NAME)) as directory:
        gathered = _gather(found.items, workers, quick)
        whole = gathered.groups.whole()
        if not whole.records and not gathered.skipped:
            raise NothingMatched(f"no tensor file in {place} matches the selection")
        if not whole.records:
            kind = CapdError if found.files else DamagedRecord
            raise kind(f"nothing to report: none of {found.items.total:,} could be read")
        _write(directory, found.sources, gathered, quick)
        problem = _draw(directory, gathered)
    _told(directory, gathered, as_json)
    if problem is not None:
        raise ConfigError(f"no figures were drawn, the other files stand: {problem}")
    raise typer.Exit((1 if found.files else 4) if gathered.skipped else 0)


class _Found(NamedTuple):
    """What to look at. sources: where it is; files: these are tensor files, not runs."""

    sources: list[str]
    items: Items
    files: bool


def _found(place: Path, run: str | None, all_runs: bool, tests: Tests, layer_base: int) -> _Found:
    from capd.io.items import items_of_files, items_of_runs

    if place.is_dir() and not is_run(place) and not any(place.glob("*.zarr/zarr.json")):
        items = items_of_files(place, tests, layer_base)
        if items.total:
            return _Found([str(place)], items, files=True)
    paths = _runs(place, run, all_runs)
    items = items_of_runs(paths, tests)
    sources = [str(path) for path in paths]
    if not items.total:
        why = " matches the selection" if tests else " yet"
        raise NothingMatched(f"no series in {', '.join(sources)}{why}")
    return _Found(sources, items, files=False)


def _runs(place: Path, run: str | None, all_runs: bool) -> list[Path]:
    if any(place.glob("*/*.pt")):
        note(f"{place} has tensor files, too, which are left out; `capd import` makes a run of them")
    if not all_runs:
        return [resolve_run(place, run)]
    if run is not None:
        raise ConfigError("--run names one run and --all-runs takes all of them; give one of the two")
    from capd.store.reader import runs

    return ([] if is_run(place) else list(runs(place))) or [resolve_run(place)]


def _gather(items: Items, workers: int | None, quick: bool) -> Gathered:
    from capd.report.gather import Gathered, Skipped, gather
    from capd.server.budget import usable_cpus

    gathered = Gathered()
    threads = workers or max(1, round(usable_cpus()))
    with progress_bar(items.total, "records") as progress:
        for seen in gather(items.found, gathered, threads=threads, quick=quick):
            if isinstance(seen, Skipped):
                progress.say(f"skipped {seen.name}: {seen.reason}")
            progress.add(0 if isinstance(seen, Skipped) else seen)
    if gathered.without_statistics:
        note(
            f"{gathered.without_statistics:,} records have no stored statistics: --quick leaves their values out"
        )
    return gathered


def _write(directory: ReportDirectory, sources: Sequence[str], gathered: Gathered, quick: bool) -> None:
    from capd.report.document import document, json_text
    from capd.report.text import report_lines

    directory.write(JSON_NAME, json_text(document(sources, gathered, quick=quick)).encode())
    lines = report_lines(sources, gathered, quick=quick)
    directory.write(TEXT_NAME, "".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _draw(directory: ReportDirectory, gathered: Gathered) -> CapdError | None:
    """Write the pages; returns why there are none where matplotlib is missing."""
    from capd.report.figures import must_have_matplotlib
    from capd.report.pages import all_pages

    try:
        must_have_matplotlib()
    except CapdError as error:
        directory.remove_others()
        return error
    pages = list(all_pages(gathered.groups))
    with progress_bar(len(pages), "pages") as progress:
        for page in pages:
            payload = page.png()
            directory.write(page.name, payload)
            progress.add(len(payload))
    directory.remove_others()
    return None


def _told(directory: ReportDirectory, gathered: Gathered, as_json: bool) -> None:
    groups, whole = gathered.groups, gathered.groups.whole()
    types = groups.values(("quant_type",), "quant_type")
    if as_json:
        skipped = [{"name": one.name, "reason": one.reason} for one in gathered.skipped]
        found = {"records": whole.records, "raw_bytes": whole.raw_bytes, "quant_types": types}
        print_json(
            {"directory": os.fspath(directory.path), **found, "files": directory.written, "skipped": skipped}
        )
        return
    parts = [f"{human_count(whole.records)} records of {human_count(len(types))} quant types"]
    parts += [f"{human_nbytes(whole.raw_bytes)} raw", f"{human_count(len(directory.written))} files"]
    parts += [f"{human_count(len(gathered.skipped))} skipped"] if gathered.skipped else []
    print_lines([f"{directory.path}: {', '.join(parts)}"])
