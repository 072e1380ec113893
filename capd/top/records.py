"""The list of the newest records, and the statistics of one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from capd.live.bars import exponent_bars
from capd.live.records import NewRecord
from capd.store.format.dtypes import is_statistics
from capd.top.columns import TopColumn
from capd.top.lines import Line, Span, facts, line, rule
from capd.top.text import amount, count, fit_name, safe

__all__ = ["RECORD_COLUMNS", "RECORD_ORDERS", "chosen_records", "record_name", "statistics_lines"]


def record_name(record: NewRecord) -> str:
    """Return the name of a record's tensor: its module, its operation and its name."""
    key = record.key
    return safe(f"{key.module or key.component} {key.operation}.{key.tensor_name}")


def _number(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _absmax(record: NewRecord) -> str:
    return "-" if record.stats is None else _number(record.stats.absmax)


def _bad(record: NewRecord) -> int:
    return 0 if record.stats is None else record.stats.nan + record.stats.inf


def _bad_text(record: NewRecord) -> str:
    return "-" if record.stats is None else count(_bad(record))


def _bad_style(record: NewRecord) -> str:
    return "bold red" if _bad(record) else ""


def _shape(record: NewRecord) -> str:
    return "×".join(map(str, record.shape)) or "scalar"


RECORD_COLUMNS: Sequence[TopColumn[NewRecord]] = (
    TopColumn("step", 8, lambda record: count(record.moment.iteration), sort="newest"),
    TopColumn("rank", 5, lambda record: str(record.key.rank)),
    TopColumn("tensor", 10, record_name, right=False, grows=True, sort="tensor"),
    TopColumn("absmax", 10, _absmax, _bad_style, least=50, sort="absmax"),
    TopColumn("NaN+Inf", 8, _bad_text, _bad_style, least=60, sort="NaN+Inf"),
    TopColumn("micro", 5, lambda record: str(record.moment.micro_batch), least=90),
    TopColumn("shape", 14, _shape, least=72, right=False),
    TopColumn("dtype", 10, lambda record: safe(record.dtype), least=100, right=False),
)

RECORD_ORDERS: dict[str, Callable[[NewRecord], Any]] = {
    "newest": lambda record: -record.moment.time_ns,
    "tensor": lambda record: (record_name(record), record.key.rank),
    "absmax": lambda record: -(record.stats.absmax or 0) if record.stats else 1,
    "NaN+Inf": lambda record: -_bad(record),
}
"""The orders of the list by name. Equal records keep the newest first."""


def chosen_records(records: Sequence[NewRecord], order: str, wanted: str) -> list[NewRecord]:
    """Return the records whose path or name has the wanted text, or fits it as a pattern, in this order."""
    low = wanted.lower()

    def fits(record: NewRecord) -> bool:
        text = f"{record.path} {record_name(record)} rank {record.key.rank}".lower()
        return fnmatchcase(text, f"*{low}*") if set(low) & set("*?") else low in text

    found = [record for record in records if not low or fits(record)]
    return found if order == "newest" else sorted(found, key=RECORD_ORDERS[order])


def statistics_lines(record: NewRecord, width: int, height: int) -> list[Line]:
    """Return what the catalog knows of a record, with a histogram of its exponents, in at most `height` lines.

    With a negative height there are as many lines as it takes.
    """
    moment = record.moment
    when = (
        time.strftime("%H:%M:%S", time.localtime(moment.time_ns / 1e9)) if moment.time_ns > 0 else "unknown"
    )
    lines = [
        rule(record_name(record), width),
        (Span(fit_name(safe(f"{record.path}#{record.number}"), width), "dim"),),
        *facts(
            [
                f"step {moment.iteration:,}",
                f"micro-batch {moment.micro_batch}",
                f"call {moment.call}",
                f"attempt {moment.attempt}",
                f"at {when}",
                *(["recomputed"] if moment.recompute else []),
            ],
            width,
        ),
        *facts(
            [f"{_shape(record)} {safe(record.dtype)}", f"on {safe(record.device)}", amount(record.nbytes)],
            width,
        ),
    ]
    stats = record.stats
    if stats is None:
        why = "its elements are its statistics" if is_statistics(record.dtype) else "the daemon keeps none"
        return [*lines, line(f"no statistics: {why}", width, "dim")][: height if height >= 0 else None]
    bad = "bold red" if stats.nan or stats.inf else ""
    lines += facts(
        [f"count {stats.count:,}", f"zero {stats.zero:,}", f"NaN {stats.nan:,}", f"Inf {stats.inf:,}"],
        width,
        bad,
    )
    extremes = {"min": stats.min, "max": stats.max, "absmax": stats.absmax}
    lines += facts([f"{name} {_number(value)}" for name, value in extremes.items()], width)
    lines += facts([f"mean {_number(stats.mean)}", f"std {_number(stats.std)}"], width)
    room = 32 if height < 0 else height - len(lines)
    if room >= 3:
        # Zeros and values that are not finite have rows of their own.
        bars = exponent_bars(stats.exponent_histogram, max(8, min(40, width - 32)), max(1, room - 2))
        lines += [line(bar, width) for bar in bars]
    return lines[: height if height >= 0 else None]
