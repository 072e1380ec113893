"""The files of figures that commands write: their names, and one file for each page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capd.errors import CapdError, ConfigError

if TYPE_CHECKING:
    from capd.report.figures.style import Look, Page

__all__ = ["check_name", "refuse_existing", "written_pages"]

_FIGURES = ("png", "svg", "pdf")


def check_name(out: Path, *others: str) -> None:
    """Raise ConfigError for a name that ends as no figure's or other file's, and for a figure without matplotlib."""
    from capd.report.figures.style import must_have_matplotlib

    endings, kind = (*others, *_FIGURES), out.suffix[1:].lower()
    if kind not in endings:
        raise ConfigError(f"-o {out}: the name must end in {', '.join(f'.{one}' for one in endings)}")
    if kind in _FIGURES:
        try:
            must_have_matplotlib()
        except CapdError as error:
            raise ConfigError(str(error)) from error


def refuse_existing(paths: Sequence[Path]) -> None:
    """Raise CapdError for the first path that exists."""
    for path in paths:
        if os.path.lexists(path):
            raise CapdError(f"{path} exists already; choose another name, or replace it with --force")


def written_pages(pages: Sequence[Page], out: Path, look: Look, *, force: bool) -> list[Path]:
    """Write one file, or one for each page: x_1.png and so on. Each file is whole or absent.

    Raises:
        CapdError: If a file exists and is not to be replaced, or cannot be written.
        StoreFull: If a file does not fit on the disk.
    """
    from capd.report.image_files import write_single

    paths = [out]
    if len(pages) > 1:
        paths = [out.with_name(f"{out.stem}_{number}{out.suffix}") for number in range(1, len(pages) + 1)]
    if not force:
        refuse_existing(paths)
    for path, page in zip(paths, pages, strict=True):
        write_single(path, page.image(out.suffix[1:].lower(), look), replace=force)
    return paths
