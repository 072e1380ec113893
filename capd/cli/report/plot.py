"""`capd plot`: draws one figure of runs or of a directory of tensor files, for a paper."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capd.cli.completion import any_of, any_where, format_lists, store_paths
from capd.cli.figure_files import check_name, refuse_existing, written_pages
from capd.cli.options import Json, flag, grouped, option
from capd.cli.output import print_either
from capd.cli.report.gathered import choices_of, contents, contents_json, gathered_of
from capd.cli.report.trends import TREND_WORDS, plot_trend
from capd.cli.sources import SourceOptions, found_in
from capd.cli.stores import Given
from capd.errors import ConfigError, NothingMatched
from capd.store.objects.address import place_of

if TYPE_CHECKING:
    from capd.report.figures.kinds import FigureKind, Wanted
    from capd.report.figures.style import Look

__all__ = ["plot"]

_KINDS = "distribution, exponents, layers, heatmap, boxes, channels, iterations, hifp8, overflow, tensor"
_TREND = "trend"
_METRICS = "sqnr, underflow, saturation, flush, relative, l2, cosine, mse, mae"
_SIZE = re.compile(r"(\d{1,3}(?:\.\d{1,3})?)x(\d{1,3}(?:\.\d{1,3})?)")
_LEAST_INCHES, _MOST_INCHES = 1.0, 100.0


@grouped
def plot(
    store: Annotated[
        Given,
        typer.Argument(
            metavar="STORE",
            parser=place_of,
            help="A run, a directory of runs, or of .pt files.",
            show_default=False,
            autocompletion=store_paths,
        ),
    ],
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="What to draw: one of the kinds above.",
            show_default=False,
            autocompletion=any_of(*_KINDS.split(", "), _TREND),
        ),
    ],
    out: Annotated[Path, option("--out", "FILE", "x.png, x.svg or x.pdf.", "-o", show_default=False)],
    formats: Annotated[
        str | None,
        option(
            "--formats",
            "LIST",
            "Number formats of heatmap, tensor, exponents, boxes and trend, as mxfp8,mxfp8:e5m2,nvfp4 [default: five "
            "of them; exponents: hifp8 and the elements; boxes: none; trend: those of the metric].",
            autocompletion=format_lists,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        option(
            "--metric",
            "WORD",
            f"Error of heatmap, and of boxes with --formats: {_METRICS} [default: sqnr]. Of trend: one of `capd "
            "metrics` [default: noise-ratio].",
            autocompletion=any_where("kind", _TREND, TREND_WORDS, _METRICS.split(", ")),
        ),
    ] = None,
    size: Annotated[
        str | None,
        option("--size", "WxH", "Width and height in inches, as 3.3x2.5 [default: as large as needed]."),
    ] = None,
    dpi: Annotated[int, option("--dpi", "N", "Dots per inch of a PNG.", min=30, max=1200)] = 200,
    title: Annotated[
        str | None, option("--title", "TEXT", 'Title above the figure; "" for none [default: what it shows].')
    ] = None,
    log: Annotated[
        bool | None,
        flag(
            "--log/--linear",
            "Axes of values, or colours of heatmap [default: logarithmic for statistics of gradients, else linear].",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Replace FILE.")] = False,
    *,
    source: SourceOptions,
    as_json: Json = False,
) -> None:
    """Draw one figure of a run into FILE: PNG, SVG or PDF. The same records give the same bytes.

    STORE may be a run, a directory of runs, or a directory of .pt files. Figures need `pip install "capd[plot]"`. A
    figure of several pages becomes x_1.pdf, x_2.pdf and so on. Each file is whole or absent; the umask gives its mode.
    Unreadable records and files are named and skipped. docs/plots.md shows how to read the figures.

    \b
    Kinds:
      distribution  histograms of the values, for each tensor name
      exponents     binary exponents, and the mantissa bits of formats there
      layers        mean, std and absmax by layer
      heatmap       the error of each format, layer × tensor name
      boxes         the layers as boxes, by quant type; or errors of --formats
      channels      the largest magnitude of each channel
      iterations    mean, std and absmax by iteration
      hifp8         regimes, codes and errors of HiFloat8
      overflow      values above and below the range of each format
      tensor        all about one tensor name on one page
      trend         a metric of `capd metrics` by iteration (--metric)

    \b
    Examples:
      capd plot captures layers -o layers.pdf --tensor input
      capd plot captures heatmap -o map.svg --metric underflow

    \b
    Exit codes:
      1  FILE exists or cannot be written, or bad .pt files were skipped
      2  an unknown kind, format, metric or ending, or matplotlib is missing
      4  damaged records were skipped
      5  nothing matches, or there is nothing of that kind to draw
      6  the disk is full
    """
    if kind == _TREND:
        look = _look(out, size, dpi, title)
        if not force:
            refuse_existing([out])
        raise typer.Exit(
            plot_trend(
                found_in(store, source), out, metric or TREND_WORDS[0], formats, look, log=bool(log), force=force,
                as_json=as_json,
            )
        )  # fmt: skip
    chosen, wanted, look = _checked(kind, out, formats, metric, size, dpi, title, log)
    if not force:
        refuse_existing([out])
    found = found_in(store, source)
    quick = chosen.reads == "statistics" and not (wanted.choices and chosen.metric)
    measured = wanted.choices if chosen.metric or chosen.reads == "errors" else ()
    gathered = gathered_of(found, quick=quick, choices=measured, channels=chosen.channels)
    pages = list(chosen.pages(gathered.groups, wanted))
    if not pages:
        raise NothingMatched(f"nothing to draw as {kind}: {chosen.without}")
    written = written_pages(pages, out, look, force=force)
    print_either(
        {"kind": kind, "files": [os.fspath(path) for path in written], **contents_json(gathered)},
        [f"{path}: {kind} of {contents(gathered)}" for path in written],
        as_json=as_json,
    )
    raise typer.Exit(found.exit_code(gathered))


def _checked(
    kind: str,
    out: Path,
    formats: str | None,
    metric: str | None,
    size: str | None,
    dpi: int,
    title: str | None,
    log: bool | None,
) -> tuple[FigureKind, Wanted, Look]:
    """Check all options before a record is read. Raises ConfigError."""
    from capd.analyze.format_choice import DEFAULT_CHOICES
    from capd.report.figures.error_maps import METRICS
    from capd.report.figures.kinds import KINDS, Wanted

    chosen = KINDS.get(kind)
    if chosen is None:
        raise ConfigError(f"{kind!r} is not a kind of figure; use one of {_KINDS}, {_TREND}")
    look = _look(out, size, dpi, title)
    for name, given, taken in (
        ("--formats", formats is not None, chosen.formats),
        ("--metric", metric is not None, chosen.metric),
        ("--log", log is not None, chosen.log),
    ):
        if given and not taken:
            having = ", ".join(other for other, one in KINDS.items() if getattr(one, name[2:]))
            raise ConfigError(f"{kind} takes no {name}; {having} do")
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"--metric {metric!r} is not known; use one of {', '.join(METRICS)}")
    if metric is not None and kind == "boxes" and formats is None:
        raise ConfigError("--metric of boxes needs formats; name them with --formats")
    choices = choices_of(formats) if formats is not None else ()
    if not choices and chosen.reads == "errors" and formats is None:
        choices = DEFAULT_CHOICES
    return chosen, Wanted(choices, metric or "sqnr", log), look


def _look(out: Path, size: str | None, dpi: int, title: str | None) -> Look:
    """Check what all kinds need. Raises ConfigError."""
    from capd.report.figures.style import Look

    check_name(out)
    return Look(None if size is None else _inches(size), dpi, title)


def _inches(text: str) -> tuple[float, float]:
    match = _SIZE.fullmatch(text)
    sides = (float(match[1]), float(match[2])) if match else ()
    if not sides or not all(_LEAST_INCHES <= side <= _MOST_INCHES for side in sides):
        raise ConfigError(
            f"--size {text!r}: give width and height in inches, {_LEAST_INCHES:g} to {_MOST_INCHES:g}, as 3.3x2.5"
        )
    return sides[0], sides[1]
