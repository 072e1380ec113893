"""`capd metrics`: the numbers that papers on low-precision training plot, over the steps of a run."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import field_lists, format_lists, lists_of
from capd.cli.figure_files import check_name, refuse_existing, written_pages
from capd.cli.options import Json, Wide, flag, grouped, option
from capd.cli.output import note, print_json, print_lines
from capd.cli.report.metrics_output import csv_cell, name_unmeasured, print_trends
from capd.cli.report.trends import (
    TREND_WORDS,
    exit_code,
    formats_for,
    gathered_trends,
    refuse_empty,
    whole_numbers,
)
from capd.cli.sources import SourceOptions, found_in
from capd.cli.stores import StoreArgument, default_store
from capd.errors import ConfigError
from capd.strict_json import strict_json

if TYPE_CHECKING:
    from capd.report.trends.gather import Trends
    from capd.report.trends.kinds import TrendKind

__all__ = ["metrics"]

_LEAST_SIZE, _MOST_SIZE = 2, 128


@grouped
def metrics(
    store: StoreArgument = None,
    metric: Annotated[
        str | None,
        option(
            "--metric",
            "LIST",
            "Metrics, as noise-ratio,scales [default: noise-ratio,scales,last-bucket,dead-zone,kurtosis].",
            autocompletion=lists_of(*TREND_WORDS),
        ),
    ] = None,
    by: Annotated[
        str,
        option(
            "--by", "FIELDS", "Group by these, as layer,tensor_name, or none.", autocompletion=field_lists
        ),
    ] = "tensor_name",
    formats: Annotated[
        str | None,
        option(
            "--formats",
            "LIST",
            "Number formats, as mxfp8,nvfp4:16x16 [default: those of each metric].",
            autocompletion=format_lists,
        ),
    ] = None,
    hadamard: Annotated[
        str,
        option("--hadamard", "SIZES", "Sizes of the transforms of hadamard, powers of two from 2 to 128."),
    ] = "16,32,64,128",
    top: Annotated[
        int,
        option("--top", "K", "The number of hot channels, and of singular values of rank.", min=1, max=1024),
    ] = 8,
    window: Annotated[
        str, option("--window", "LIST", "Steps of the history of amax-history, 1 to 65536.")
    ] = "1,16,1024",
    margin: Annotated[
        str, option("--margin", "LIST", "Margins of amax-history, binades from 0 to 64.")
    ] = "0",
    out: Annotated[
        Path | None,
        option("--out", "FILE", "Write a figure (x.png, x.svg, x.pdf) or all numbers (x.csv).", "-o"),
    ] = None,
    force: Annotated[bool, flag("--force", "Replace FILE.")] = False,
    as_csv: Annotated[bool, flag("--csv", "Print comma-separated values, a row for each number.")] = False,
    *,
    source: SourceOptions,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show the numbers that papers on low-precision training plot over the steps.

    A table has all steps of a group together; --json, --csv and -o have each step, too. The sums merge without
    rounding, so groups may be of any layers, ranks and steps. Formats are measured on high-precision records
    (bfloat16, float16, float32; float64 is rounded to float32), as `capd compare` does. A metric that a record does
    not have is counted with its reason on stderr. docs/paper-metrics.md has formulas and sources.

    \b
    Metrics:
      noise-ratio   norm over quantisation noise, against √3; by format
      scales        histogram, entropy and spread of block scales; by format
      last-bucket   values that become the largest of the grid; by format
      dead-zone     values below half the smallest step; by format
      kurtosis      kurtosis and crest factor
      hadamard      SQNR, kurtosis, ranges with and without a transform
      channels      hot channels: whether they stay the same, their energy
      oscillation   codes that change from step to step; by format
      amax-history  delayed scaling: overflow, wasted binades
      rank          stable rank, share of the largest singular values
      accumulation  products of linear layers, partial sums in fewer bits

    STORE may be a directory of .pt files; channels, oscillation and amax-history follow the steps of a run alone.
    Memory: 128 MiB, or one record with ten times its bytes (oscillation: 20), and some KiB for each group and step.

    \b
    Examples:
      capd metrics captures --metric noise-ratio --tensor grad_output
      capd metrics captures --metric oscillation --tensor weight --by layer
      capd metrics captures --metric scales --formats nvfp4 -o scales.png

    \b
    Exit codes:
      1  FILE exists or cannot be written, or bad .pt files were skipped
      2  an unknown metric, format, field or ending, or matplotlib is missing
      4  damaged records were skipped
      5  nothing matches, or no record has any of the metrics
      6  the disk is full
    """
    from capd.report.trends.document import trend_document
    from capd.report.trends.kinds import DEFAULT_TRENDS, TrendOptions, trend_kinds

    kinds = trend_kinds(DEFAULT_TRENDS if metric is None else metric)
    options = TrendOptions(
        formats_for(kinds, formats),
        sizes=_sizes(hadamard),
        top=top,
        windows=whole_numbers("--window", window, 1, 1 << 16),
        margins=whole_numbers("--margin", margin, 0, 64),
    )
    _check_output(out, kinds, force=force, as_csv=as_csv, as_json=as_json)
    found = found_in(default_store() if store is None else store, source)
    trends = gathered_trends(found, kinds, _fields(by), options)
    refuse_empty(trends, found.names)
    document = trend_document(found.names, trends)
    files = [] if out is None else _written(trends, document, out, force=force)
    if as_json:
        print_json(strict_json({**document, "files": [os.fspath(path) for path in files]}))
    elif as_csv:
        print_lines(_csv(document).splitlines())
    elif files:
        print_lines([f"{path}: {', '.join(one.name for one in kinds)}" for path in files])
    else:
        print_trends(document, wide=wide)
    name_unmeasured(document)
    raise typer.Exit(exit_code(found, trends))


def _sizes(text: str) -> tuple[int, ...]:
    sizes = whole_numbers("--hadamard", text, _LEAST_SIZE, _MOST_SIZE)
    for size in sizes:
        if size & (size - 1):
            raise ConfigError(f"--hadamard {size} is no power of two; sizes are 2, 4, 8 … {_MOST_SIZE}")
    return sizes


def _fields(by: str) -> tuple[str, ...]:
    from capd.analyze.groups import checked_fields

    return () if by == "none" else checked_fields("--by", (word.strip() for word in by.split(",")))


def _check_output(
    out: Path | None, kinds: Sequence[TrendKind], *, force: bool, as_csv: bool, as_json: bool
) -> None:
    """Check FILE before a record is read. Raises ConfigError, or CapdError if it exists."""
    if as_csv and as_json:
        raise ConfigError("--csv and --json are two formats of one output; give one of them")
    if out is None:
        return
    check_name(out, "csv")
    if out.suffix.lower() != ".csv" and len(kinds) > 1:
        note("a figure for each metric, in files of its own")
    if not force:
        refuse_existing([out])


def _written(trends: Trends, document: dict[str, Any], out: Path, *, force: bool) -> list[Path]:
    if out.suffix[1:].lower() == "csv":
        from capd.report.image_files import write_single

        write_single(out, _csv(document).encode(), replace=force)
        return [out]
    from capd.report.figures.style import Look
    from capd.report.figures.trends.pages import trend_pages

    pages = [page for one in trends.kinds for page in trend_pages(one, trends.fields)]
    return written_pages(pages, out, Look(), force=force)


def _csv(document: dict[str, Any]) -> str:
    from capd.report.trends.document import LONG_COLUMNS, long_rows

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["metric", *document["by"], *LONG_COLUMNS])
    writer.writerows([csv_cell(value) for value in row] for row in long_rows(document))
    return text.getvalue()
