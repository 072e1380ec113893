"""The records of `capd metrics`, and of the figures that it shares with `capd plot`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from capd.cli.figure_files import written_pages
from capd.cli.output import human_count, note, print_either
from capd.cli.progress import Progress
from capd.cli.sources import Sources, one_thread_each
from capd.errors import CapdError, ConfigError, DamagedRecord, NothingMatched

if TYPE_CHECKING:
    from capd.analyze.format_choice import FormatChoice
    from capd.report.figures.style import Look
    from capd.report.trends.gather import Trends
    from capd.report.trends.kinds import TrendKind, TrendOptions

__all__ = [
    "TREND_WORDS", "exit_code", "formats_for", "gathered_trends", "plot_trend", "refuse_empty", "whole_numbers",
]  # fmt: skip

TREND_WORDS = (
    "noise-ratio", "scales", "last-bucket", "dead-zone", "kurtosis", "hadamard", "channels", "oscillation",
    "amax-history", "rank", "accumulation",
)  # fmt: skip
"""The words of the metrics, which the help and the completion have without importing them."""

_MOST_NUMBERS = 16


def gathered_trends(
    found: Sources, kinds: Sequence[TrendKind], fields: tuple[str, ...], options: TrendOptions
) -> Trends:
    """Read all records with a progress bar, and name skipped ones on stderr.

    Raises:
        ConfigError: If a metric follows a series, and the records are of .pt files, which have no order.
        NothingMatched: If no tensor file matches the selection.
        DamagedRecord: If no record of a run could be read.
        CapdError: If no tensor file could be read.
    """
    from capd.io.items import Skipped
    from capd.io.sample import Sample
    from capd.report.trends.gather import Trends, gather_trends
    from capd.server.heap import settled_heap

    following = [kind.name for kind in kinds if kind.follower is not None]
    if found.files and following:
        raise ConfigError(
            f"{', '.join(following)} follows a tensor from step to step, and {found.names[0]} has .pt files, which "
            "have no order; `capd import` makes a run of them"
        )
    trends = Trends.of(kinds, fields, options)
    trends.sample = Sample(found.share) if found.share < 1 else None
    one_thread_each()
    with settled_heap(), Progress(found.items.total, "records") as progress:
        for seen in gather_trends(found.items.found, trends, threads=found.threads):
            if isinstance(seen, Skipped):
                progress.say(f"skipped {seen.name}: {seen.reason}")
            progress.add(0 if isinstance(seen, Skipped) else seen)
    if not trends.records:
        if not trends.skipped:
            raise NothingMatched(f"no tensor file in {found.names[0]} matches the selection")
        kind = CapdError if found.files else DamagedRecord
        raise kind(f"none of {found.items.total:,} records could be read")
    if trends.sample is not None:
        note(f"{human_count(trends.sample.records)} of {human_count(trends.sample.of, 'record')} were read")
    return trends


def whole_numbers(name: str, text: str, least: int, most: int) -> tuple[int, ...]:
    """Return the whole numbers that an option lists, each once. Raises ConfigError for anything else."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 10 and least <= int(word) <= most):
            raise ConfigError(
                f"{name} {word!r} is no whole number from {least} to {most}; give some, as 1,16"
            )
    found = tuple(dict.fromkeys(map(int, words)))
    if len(found) > _MOST_NUMBERS:
        raise ConfigError(f"{name} has {len(found)} numbers; give at most {_MOST_NUMBERS}")
    return found


def formats_for(kinds: Sequence[TrendKind], formats: str | None) -> Sequence[FormatChoice]:
    """Return the formats that `--formats` names. Raises ConfigError for unknown ones, or if no kind takes any."""
    from capd.analyze.format_choice import choices

    if formats is None:
        return ()
    if not any(kind.formats for kind in kinds):
        raise ConfigError(f"{', '.join(kind.name for kind in kinds)} takes no --formats")
    return choices(formats)


def refuse_empty(trends: Trends, sources: Sequence[str]) -> None:
    """Raise NothingMatched with the reasons if no record has any of the metrics."""
    if not any(one.groups for one in trends.kinds):
        reasons = "; ".join(dict.fromkeys(reason for one in trends.kinds for reason in one.unmeasured))
        names = ", ".join(one.kind.name for one in trends.kinds)
        raise NothingMatched(
            f"no record in {', '.join(sources)} has {names}: {reasons or 'nothing was read'}"
        )


def plot_trend(
    found: Sources,
    out: Path,
    metric: str,
    formats: str | None,
    look: Look,
    *,
    log: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Draw one metric by quant type and tensor name into FILE, say so, and return the exit code."""
    from capd.report.figures.trends.pages import trend_pages
    from capd.report.trends.kinds import TrendOptions, trend_kinds

    kinds = trend_kinds(metric)
    if len(kinds) > 1:
        raise ConfigError(f"--metric {metric!r}: a figure draws one metric")
    trends = gathered_trends(
        found, kinds, ("quant_type", "tensor_name"), TrendOptions(formats_for(kinds, formats))
    )
    refuse_empty(trends, found.names)
    pages = list(trend_pages(trends.kinds[0], trends.fields, log=log))
    written = written_pages(pages, out, look, force=force)
    document = {
        "kind": "trend",
        "metric": metric,
        "files": [os.fspath(path) for path in written],
        "records": trends.records,
        "skipped": [{"name": one.name, "reason": one.reason} for one in trends.skipped],
    }
    records = human_count(trends.records, "record")
    print_either(document, [f"{path}: {metric} of {records}" for path in written], as_json=as_json)
    return exit_code(found, trends)


def exit_code(found: Sources, trends: Trends) -> int:
    """Return 4 if damaged records were skipped, 1 if bad files were skipped, otherwise 0."""
    return (1 if found.files else 4) if trends.skipped else 0
