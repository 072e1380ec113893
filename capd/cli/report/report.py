"""`capd report`: reports runs or a directory of tensor files, as one page for a browser or as a directory of files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from capd.analyze.format_choice import DEFAULT_FORMATS
from capd.cli.options import Json, flag, option
from capd.cli.output import human_count, human_nbytes, print_json, print_lines
from capd.cli.progress import progress_bar
from capd.cli.report.format_option import Formats, choices_of
from capd.cli.report.gathered import contents, contents_json, gathered_of, skipped_code
from capd.cli.report.page import is_page, must_name_directory, page_of, write_page
from capd.cli.selection import Tests, selects_keys
from capd.cli.sources import AllRuns, LayerBase, Sources, Workers, found_in
from capd.cli.stores import RunOption, StoreArgument, default_store
from capd.errors import CapdError, ConfigError

if TYPE_CHECKING:
    from capd.analyze.format_choice import FormatChoice
    from capd.report.directory import ReportDirectory
    from capd.report.gather import GatheredRecords

__all__ = ["WrittenReport", "report", "write_report"]

JSON_NAME, TEXT_NAME = "global_statistics.json", "global_statistics_report.txt"
PAGE_NAME = "report.html"


@selects_keys
def report(
    store: StoreArgument = None,
    out: Annotated[
        Path,
        option("--out", "FILE.html|DIR", "One page, or a directory for all files.", "-o", show_default=False),
    ] = ...,  # type: ignore[assignment]  # typer's way to say that it is required
    run: RunOption = None,
    all_runs: AllRuns = False,
    layer_base: LayerBase = 0,
    tests: Tests = (),
    workers: Workers = None,
    formats: Formats = DEFAULT_FORMATS,
    force: Annotated[bool, flag("--force", "Replace FILE.html, even if no report wrote it.")] = False,
    quick: Annotated[bool, flag("--quick", "Use only stored statistics; read no tensor of a run.")] = False,
    as_json: Json = False,
) -> None:
    """Write statistics and figures of a run: one page for a browser, or a directory of files.

    A name that ends in .html is one page, which works offline. Any other name is a directory: it gets the page,
    statistics as JSON and text, and figures as PNG files (docs/report.md lists them). Figures need `pip install
    "capd[plot]"`; without it, the other files are written and the exit code is 2.

    STORE may also be a directory of .pt files of tensor_saver, which are checked as by `capd import` and read in
    place. If records share a moment, only the job's latest attempt counts.

    Blocked formats take most of the time; --formats none measures none. --quick reads no tensor of a run, and
    leaves out quantiles, value distributions, errors and channels. Without it, every element is read once. The
    statistics of .pt files are always computed. About 128 MiB of records are in memory at once, or one record if it
    is larger. Each group with quantiles adds 60 KiB to 2 MiB.

    A new report replaces the files of an earlier report, removes pages that it lacks, and touches nothing else;
    --force replaces any FILE.html. Each file is whole or absent. Files have mode 0600, a new directory 0700.
    Unreadable records and files are named and skipped.

    \b
    Examples:
      capd report captures -o report.html
      capd report captures --run exp7 -o figures --layer 0-7
      capd report captures --all-runs -o all.html --quick

    \b
    Exit codes:
      1  a file in the way that no report wrote, or bad .pt files were skipped
      2  DIR has a file's name, such as x.pdf, or matplotlib is missing
      4  damaged records were skipped
      5  nothing matches; nothing was written
      7  another report writes to DIR
    """
    wanted = () if quick else choices_of(formats)
    place = default_store() if store is None else store
    one_page = is_page(out)
    if not one_page:
        must_name_directory(out)
    found = found_in(place, run, all_runs, tests, layer_base)
    if one_page:
        gathered = write_page(found, place, out, workers=workers, quick=quick, choices=wanted, force=force)
        _print_written({"file": os.fspath(out)}, [out.name], gathered, as_json)
        raise typer.Exit(skipped_code(found, gathered))
    if force:
        raise ConfigError(
            "--force is for one page, as in -o report.html; in a directory only files of a report are replaced"
        )
    written = write_report(found, place, out, workers=workers, quick=quick, choices=wanted)
    told = {"directory": os.fspath(written.directory.path)}
    _print_written(told, written.directory.written, written.gathered, as_json)
    if written.problem is not None:
        raise ConfigError(f"no figures were drawn, the other files are written: {written.problem}")
    raise typer.Exit(skipped_code(found, written.gathered))


class WrittenReport(NamedTuple):
    """A report that was written. `problem` is the reason why it has no figures, or None."""

    directory: ReportDirectory
    gathered: GatheredRecords
    problem: CapdError | None


def write_report(
    found: Sources,
    place: Path,
    out: Path,
    *,
    workers: int | None = None,
    quick: bool = False,
    choices: Sequence[FormatChoice] = (),
) -> WrittenReport:
    """Write the statistics, the page and the figures into a directory.

    Args:
        found: The records.
        place: The name of the records in messages.
        out: The directory.
        workers: The number of threads, None for one for each CPU.
        quick: Whether to use only stored statistics.
        choices: The formats whose errors are measured.

    Raises:
        CapdError: As `gathered_of` and `capd.report.directory.opened` do.
        OSError: If a file cannot be written.
    """
    from capd.report.directory import opened
    from capd.report.document import document, json_text
    from capd.report.text import report_lines

    with opened(out, (JSON_NAME, TEXT_NAME, PAGE_NAME)) as directory:
        gathered = gathered_of(
            found, place, workers, quick=quick, choices=choices, channels=not quick, series=True
        )
        plain = document(found.sources, gathered, quick=quick)
        directory.write(JSON_NAME, json_text(plain).encode())
        lines = "".join(f"{line}\n" for line in report_lines(plain))
        directory.write(TEXT_NAME, lines.encode(errors="replace"))
        directory.write(PAGE_NAME, page_of(plain, found, gathered, choices))
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
    with progress_bar(len(pages), "pages") as progress:
        for page in pages:
            payload = page.png()
            directory.write(page.name, payload)
            progress.add(len(payload))
    directory.remove_others()
    return None


def _print_written(
    where: dict[str, str], files: Sequence[str], gathered: GatheredRecords, as_json: bool
) -> None:
    if as_json:
        print_json({**where, **contents_json(gathered), "files": list(files)})
        return
    size = human_nbytes(gathered.groups.whole().raw_bytes)
    print_lines(
        [f"{next(iter(where.values()))}: {contents(gathered)}; {size} raw, {human_count(len(files), 'file')}"]
    )
