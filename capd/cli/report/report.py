"""`capd report`: reports runs or a directory of tensor files, as one page for a browser or as a directory of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from capd.analyze.format_choice import DEFAULT_FORMATS
from capd.cli.completion import format_lists, recipe_lists, store_paths
from capd.cli.options import Json, flag, grouped, option
from capd.cli.output import human_count, human_nbytes, note, print_either
from capd.cli.products.replayed import recipes_of, replay_numbers
from capd.cli.progress import Progress
from capd.cli.report.gathered import choices_of, contents, contents_json, gathered_of
from capd.cli.scheduling import ClusterOptions
from capd.cli.sources import SourceOptions, Sources, found_beside, found_in
from capd.cli.stores import Given, default_store
from capd.errors import CapdError, ConfigError
from capd.store.objects.address import place_of

if TYPE_CHECKING:
    from capd.analyze.format_choice import FormatChoice
    from capd.replay.recipes import ReplayRecipe
    from capd.report.directory import ReportDirectory
    from capd.report.gather import GatheredRecords

__all__ = ["WrittenReport", "must_name_directory", "report", "write_report"]

JSON_NAME, TEXT_NAME = "global_statistics.json", "global_statistics_report.txt"
PAGE_NAME = "report.html"
Asked: TypeAlias = "tuple[Sequence[ReplayRecipe], SourceOptions]"
# The recipes of a replay, and the options that chose the records.

_PAGES = (".html", ".htm")
_FILES = (*_PAGES, ".pdf", ".png", ".svg", ".json", ".txt", ".csv")


@grouped
def report(
    stores: Annotated[
        list[Given] | None,
        typer.Argument(
            metavar="STORE…",
            parser=place_of,
            help="A run (NAME.zarr), or a directory of runs: the newest is read. Several are shown side by side. "
            "Default: CAPD_STORE, or store in capd.toml, or captures.",
            show_default=False,
            autocompletion=store_paths,
        ),
    ] = None,
    out: Annotated[
        Path,
        option("--out", "FILE.html|DIR", "One page, or a directory for all files.", "-o", show_default=False),
    ] = ...,  # type: ignore[assignment]  # typer's way to say that it is required
    *,
    source: SourceOptions,
    cluster: ClusterOptions,
    formats: Annotated[
        str,
        option(
            "--formats",
            "LIST",
            "Number formats to measure, as mxfp8,mxfp8:e5m2,nvfp4,hifp8:saturate; or none.",
            autocompletion=format_lists,
        ),
    ] = DEFAULT_FORMATS,
    recipe: Annotated[
        str | None,
        option(
            "--recipe",
            "LIST",
            "Also replay the products of linear layers in these recipes, as `capd replay` does.",
            autocompletion=recipe_lists,
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Replace FILE.html, even if no report wrote it.")] = False,
    quick: Annotated[bool, flag("--quick", "Use only stored statistics; read no tensor of a run.")] = False,
    as_json: Json = False,
) -> None:
    """Write statistics and figures of a run: one page for a browser, or a directory of files.

    A name that ends in .html is one page, which works offline. Any other name is a directory: it gets the page,
    statistics as JSON and text, and figures as PNG files (docs/report.md lists them). Figures need `pip install
    "capd[plot]"`; without it, the other files are written and the exit code is 2.

    STORE may also be a directory of .pt files of tensor_saver, which are checked as by `capd import` and read in
    place. If records share a moment, only the job's latest attempt counts. Several STOREs are shown side by side: the
    run's name then begins each quant type, as in `exp7: bf16`.

    Blocked formats take most of the time; --formats none measures none. --quick reads no tensor of a run, and
    leaves out quantiles, value distributions, errors and channels. Without it, every element is read once. The
    statistics of .pt files are always computed. About 128 MiB of records are in memory at once, or one record if it
    is larger. Each group with quantiles adds 60 KiB to 2 MiB. The products of a linear layer, recomputed for the
    summary, take ten times its operands, at most 2.5 GiB; larger operands are left out.

    A new report replaces the files of an earlier report, removes pages that it lacks, and touches nothing else;
    --force replaces any FILE.html. Each file is whole or absent; the umask gives their modes.
    Unreadable records and files are named and skipped.

    \b
    Examples:
      capd report captures -o report.html
      capd report captures --run exp7 -o figures --layer 0-7
      capd report captures --all-runs -o all.html --quick
      capd report runs/plain.zarr runs/mxfp8.zarr -o both.html

    \b
    Exit codes:
      1  a file in the way that no report wrote, or bad .pt files were skipped
      2  DIR has a file's name, such as x.pdf, or matplotlib is missing
      4  damaged records were skipped
      5  nothing matches; nothing was written
      7  another report writes to DIR
    """
    wanted = () if quick else choices_of(formats)
    replayed = None if recipe is None else (recipes_of(recipe), source)
    if replayed is not None and (quick or len(stores or ()) > 1):
        raise ConfigError("--recipe reads the tensors of one STORE; leave out --quick, and name one")
    one_page = out.suffix.lower() in _PAGES and not out.is_dir()
    if not one_page:
        must_name_directory(out)
    places = stores or [default_store()]
    found = found_in(places[0], source) if len(places) == 1 else found_beside(places, source)
    found = replace(found, cluster=cluster)
    if one_page:
        gathered = _write_page(found, out, quick=quick, choices=wanted, force=force, replay=replayed)
        _print_written({"file": os.fspath(out)}, [out.name], gathered, as_json)
        raise typer.Exit(found.exit_code(gathered))
    if force:
        raise ConfigError(
            "--force is for one page, as in -o report.html; in a directory only files of a report are replaced"
        )
    written = write_report(found, out, quick=quick, choices=wanted, replay=replayed)
    where = {"directory": os.fspath(written.directory.path)}
    _print_written(where, written.directory.written, written.gathered, as_json)
    if written.problem is not None:
        raise ConfigError(f"no figures were drawn, the other files are written: {written.problem}")
    raise typer.Exit(found.exit_code(written.gathered))


def must_name_directory(out: Path) -> None:
    """Raise ConfigError if `out` is a file, or has a file's name, such as x.pdf."""
    if out.is_dir() or not (out.exists() or out.suffix.lower() in _FILES):
        return
    raise ConfigError(
        f"{out} is not a directory: a report is a directory, or with `capd report -o FILE.html` one page; "
        "`capd plot` draws single figures"
    )


class _Content(NamedTuple):
    """The content of a report: the sums over the records, the document, and the bytes of the page."""

    gathered: GatheredRecords
    plain: dict[str, Any]
    page: bytes


def _content(
    found: Sources, *, quick: bool, choices: Sequence[FormatChoice], replay: Asked | None = None
) -> _Content:
    from capd.report.alert_rows import alert_rows
    from capd.report.document import document
    from capd.report.page.data import page_data
    from capd.report.page.html import page_html
    from capd.report.scalars.scalar_lines import scalar_lines

    scalars, damaged = ([], []) if found.files else scalar_lines(found.names)
    for one in damaged:
        note(f"skipped {one.name}: {one.reason}")
    gathered = gathered_of(found, quick=quick, choices=choices, channels=not quick, series=True)
    gathered.skipped += damaged
    plain = document(
        found.names, gathered, quick=quick, choices=choices, scalars=scalars,
        alerts=[] if found.files else alert_rows(found.names),
        replay=None if replay is None else replay_numbers(found, *replay),
    )  # fmt: skip
    return _Content(
        gathered, plain, page_html(page_data(plain, gathered, files=found.files, choices=choices))
    )


def _write_page(
    found: Sources,
    out: Path,
    *,
    quick: bool,
    choices: Sequence[FormatChoice],
    force: bool,
    replay: Asked | None = None,
) -> GatheredRecords:
    from capd.report.page.file import refuse_foreign_file, write_page_file

    # Reading can take long, so the file is checked first.
    refuse_foreign_file(out, force=force)
    content = _content(found, quick=quick, choices=choices, replay=replay)
    write_page_file(out, content.page, force=force)
    return content.gathered


class WrittenReport(NamedTuple):
    """A report that was written. `problem` is the reason why it has no figures, or None."""

    directory: ReportDirectory
    gathered: GatheredRecords
    problem: CapdError | None


def write_report(
    found: Sources,
    out: Path,
    *,
    quick: bool = False,
    choices: Sequence[FormatChoice] = (),
    replay: Asked | None = None,
) -> WrittenReport:
    """Write the statistics, the page and the figures into the directory `out`.

    Raises:
        CapdError: As `gathered_of` and `capd.report.directory.opened` do.
        OSError: If a file cannot be written.
    """
    from capd.report.directory import opened
    from capd.report.document import json_text
    from capd.report.text import report_lines

    with opened(out, (JSON_NAME, TEXT_NAME, PAGE_NAME)) as directory:
        gathered, plain, page = _content(found, quick=quick, choices=choices, replay=replay)
        directory.write(JSON_NAME, json_text(plain).encode())
        lines = "".join(f"{line}\n" for line in report_lines(plain))
        directory.write(TEXT_NAME, lines.encode(errors="replace"))
        directory.write(PAGE_NAME, page)
        return WrittenReport(directory, gathered, _draw(directory, gathered))


def _draw(directory: ReportDirectory, gathered: GatheredRecords) -> CapdError | None:
    """Write the figures. Return the error if matplotlib is missing."""
    from capd.report.figures.pages import all_pages
    from capd.report.figures.style import must_have_matplotlib

    try:
        must_have_matplotlib()
    except CapdError as error:
        directory.remove_others()
        return error
    pages = list(all_pages(gathered.groups))
    with Progress(len(pages), "pages") as progress:
        for page in pages:
            payload = page.png()
            directory.write(page.name, payload)
            progress.add(len(payload))
    directory.remove_others()
    return None


def _print_written(
    where: dict[str, str], files: Sequence[str], gathered: GatheredRecords, as_json: bool
) -> None:
    whole = f"{human_nbytes(gathered.groups.whole().raw_bytes)} raw, {human_count(len(files), 'file')}"
    print_either(
        {**where, **contents_json(gathered), "files": list(files)},
        [f"{next(iter(where.values()))}: {contents(gathered)}; {whole}"],
        as_json=as_json,
    )
