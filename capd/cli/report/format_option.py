"""The option `--formats`, which names number formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from capd.cli.options import option

if TYPE_CHECKING:
    from capd.analyze.format_choice import FormatChoice

__all__ = ["Formats", "choices_of"]

Formats = Annotated[
    str,
    option(
        "--formats", "LIST", "Number formats to measure, as mxfp8,mxfp8:e5m2,nvfp4,hifp8:saturate; or none."
    ),
]


def choices_of(formats: str) -> tuple[FormatChoice, ...]:
    """Return the formats that the option names, none for "none". Raises ConfigError for an unknown format."""
    from capd.analyze.format_choice import choices

    return () if formats.strip() == "none" else choices(formats)
