"""The report as one page for a browser, for `capd report -o FILE.html` and as a file of a report's directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capd.cli.report.gathered import gathered_of
from capd.cli.sources import Sources
from capd.errors import ConfigError

if TYPE_CHECKING:
    from capd.analyze.format_choice import FormatChoice
    from capd.report.gather import GatheredRecords

__all__ = ["is_page", "must_name_directory", "page_of", "write_page"]

_SUFFIXES = (".html", ".htm")
_OF_FILES = (*_SUFFIXES, ".pdf", ".png", ".svg", ".json", ".txt", ".csv")


def is_page(out: Path) -> bool:
    """Return whether `out` names a page, and not a directory of files."""
    return out.suffix.lower() in _SUFFIXES and not out.is_dir()


def must_name_directory(out: Path) -> None:
    """Raise ConfigError if `out` is a file, or has a file's name, such as x.pdf."""
    if out.is_dir() or not (out.exists() or out.suffix.lower() in _OF_FILES):
        return
    raise ConfigError(
        f"{out} is not a directory: a report is a directory, or with `capd report -o FILE.html` one page; "
        "`capd plot` draws single figures"
    )


def page_of(
    plain: dict[str, Any], found: Sources, gathered: GatheredRecords, choices: Sequence[FormatChoice]
) -> bytes:
    """Return the bytes of the page.

    Args:
        plain: The report's document.
        found: The records.
        gathered: The sums over the records, with their series.
        choices: The formats whose errors were measured.
    """
    from capd.report.page.data import page_data
    from capd.report.page.html import page_html

    return page_html(page_data(plain, gathered, files=found.files, choices=choices))


def write_page(
    found: Sources,
    place: Path,
    out: Path,
    *,
    workers: int | None,
    quick: bool,
    choices: Sequence[FormatChoice],
    force: bool,
) -> GatheredRecords:
    """Write the page to `out`.

    Args:
        found: The records.
        place: The name of the records in messages.
        out: The file.
        workers: The number of threads, None for one for each CPU.
        quick: Whether to use only stored statistics.
        choices: The formats whose errors are measured.
        force: Whether to replace a file that no report wrote.

    Raises:
        CapdError: As `gathered_of` and `capd.report.page.file.write_page_file` do.
    """
    from capd.report.document import document
    from capd.report.page.file import refuse_foreign_file, write_page_file

    # Reading can take long, so the file is checked first.
    refuse_foreign_file(out, force=force)
    gathered = gathered_of(
        found, place, workers, quick=quick, choices=choices, channels=not quick, series=True
    )
    plain = document(found.sources, gathered, quick=quick)
    write_page_file(out, page_of(plain, found, gathered, choices), force=force)
    return gathered
