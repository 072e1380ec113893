"""`capd run --report DIR`: draws what a run has collected once its job is over, without changing how the job ended."""

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
    """Refuse before the job is started what cannot become a report. Raises ConfigError, CapdError."""
    if directory is None:
        return
    from capd.cli.report.page import must_name_directory
    from capd.cli.report.report import JSON_NAME, TEXT_NAME
    from capd.report.directory import ReportDirectory
    from capd.report.figures.style import must_have_matplotlib

    if endpoint == "off":
        raise ConfigError("--report: CAPD_ENDPOINT=off captures nothing that could be drawn")
    if nodes > 1:
        raise ConfigError(
            f"--report: the job spans {nodes} nodes, and this one ends before the others may; draw afterwards with "
            f"`capd report STORE -o {directory}`"
        )
    must_name_directory(directory)
    try:
        must_have_matplotlib()
    except CapdError as error:
        raise ConfigError(f"--report: {error}") from error
    ReportDirectory(directory).refuse_foreign((JSON_NAME, TEXT_NAME))


def reported(code: int, store: Path | None, run_id: str | None, directory: Path | None) -> int:
    """Draw a run into the directory, None for none; returns the exit code of it all.

    code: the job's. It stays whatever becomes of the report, but a report that is not whole makes 1 of 0.
    """
    if directory is None:
        return code
    if store is None or run_id is None:
        note("no report: no daemon was there that could have captured anything")
        return code or 1
    path = store / f"{run_id}.zarr"
    try:
        whole = _draw(path, directory)
    except Exception as error:  # how the job ended must not be lost over whatever a report runs into
        known = isinstance(error, (CapdError, OSError))
        note(
            f"no report: {error}" if known else f"no report: internal error: {type(error).__name__}: {error}"
        )
        whole = False
    if not whole:
        note(f"`capd report {path} -o {directory}` tries again")
    return code or (0 if whole else 1)


def _draw(path: Path, directory: Path) -> bool:
    """Write the report and say so; returns whether it has everything."""
    from capd.analyze.format_choice import DEFAULT_CHOICES
    from capd.cli.report.report import write_report
    from capd.cli.sources import found_in

    if not path.is_dir():
        raise CapdError(f"nothing was captured into {path}")
    found = found_in(path, None, all_runs=False, tests=(), layer_base=0)
    written = write_report(found, path, directory, choices=DEFAULT_CHOICES)
    files = human_count(len(written.directory.written), "file")
    note(f"{directory}: {contents(written.gathered)}; {files}")
    if written.problem is not None:
        note(f"no figures were drawn: {written.problem}")
    return written.problem is None and not written.gathered.skipped


def note_undrawn(path: Path, directory: Path | None) -> None:
    """Say what is not drawn of a collection that was interrupted."""
    if directory is not None:
        note(f"nothing was drawn; `capd report {path} -o {directory}` draws what there is")
