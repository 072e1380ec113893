"""`capd run --report DIR`: draws a report of the run after its job, and never changes how the job ended."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from capd.cli.options import option
from capd.cli.output import human_count, note
from capd.cli.report.gathered import contents
from capd.errors import CapdError, ConfigError

__all__ = ["ReportInto", "check_report", "note_undrawn", "reported"]

ReportInto = Annotated[
    Path | None,
    option("--report", "DIR", "After the run, write its `capd report` with five formats into DIR."),
]


def check_report(directory: Path | None, *, endpoint: str, nodes: int) -> None:
    """Refuse, before the job starts, options that cannot give a report.

    Raises:
        ConfigError: If there would be no captures to draw, `directory` is a file, or matplotlib is missing.
        CapdError: If `directory` has files that no report wrote.
    """
    if directory is None:
        return
    from capd.cli.report.report import JSON_NAME, TEXT_NAME, must_name_directory
    from capd.report.directory import ReportDirectory
    from capd.report.figures.style import must_have_matplotlib

    if endpoint == "off":
        raise ConfigError("--report: with CAPD_ENDPOINT=off there are no captures to draw")
    if nodes > 1:
        raise ConfigError(
            f"--report: the job spans {nodes} nodes, and this one may end before the others; draw afterwards with "
            f"`capd report STORE -o {directory}`"
        )
    must_name_directory(directory)
    try:
        must_have_matplotlib()
    except CapdError as error:
        raise ConfigError(f"--report: {error}") from error
    ReportDirectory(directory).refuse_foreign((JSON_NAME, TEXT_NAME))


def reported(code: int, store: Path | None, run_id: str | None, directory: Path | None) -> int:
    """Draw a run into the directory, if there is one, and return the exit code of the command.

    It is the job's exit code, but 1 instead of 0 if the report is not whole.
    """
    if directory is None:
        return code
    if store is None or run_id is None:
        note("no report: no daemon was there to capture anything")
        return code or 1
    path = store / f"{run_id}.zarr"
    try:
        whole = _draw(path, directory)
    except Exception as error:
        # No error of a report may hide how the job ended.
        known = isinstance(error, (CapdError, OSError))
        note(
            f"no report: {error}" if known else f"no report: internal error: {type(error).__name__}: {error}"
        )
        whole = False
    if not whole:
        note(f"`capd report {path} -o {directory}` retries it")
    return code or (0 if whole else 1)


def _draw(path: Path, directory: Path) -> bool:
    """Write the report and print a note. Return whether the report is whole."""
    from capd.analyze.format_choice import DEFAULT_CHOICES
    from capd.cli.report.report import write_report
    from capd.cli.sources import SourceOptions, found_in

    if not path.is_dir():
        raise CapdError(f"nothing was captured into {path}")
    written = write_report(found_in(path, SourceOptions()), directory, choices=DEFAULT_CHOICES)
    files = human_count(len(written.directory.written), "file")
    note(f"{directory}: {contents(written.gathered)}; {files}")
    if written.problem is not None:
        note(f"no figures were drawn: {written.problem}")
    return written.problem is None and not written.gathered.skipped


def note_undrawn(path: Path, directory: Path | None) -> None:
    """Print how to draw the captures of an interrupted collection."""
    if directory is not None:
        note(f"nothing was drawn; `capd report {path} -o {directory}` draws the captures so far")
