"""The text report `global_statistics_report.txt`: the document as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capd.analyze.groups import Fields
from capd.analyze.hif8_regimes import FINITE_CODES
from capd.phrase import phrase_text
from capd.report.document import MARK, grouped
from capd.report.gather import BY_TENSOR, GROUPINGS
from capd.report.names import sample_phrase
from capd.report.verdict_document import calls_text, verdict_rows
from capd_client.process.text import human_count, human_nbytes, human_value, printable, table_lines

__all__ = ["report_lines"]

_MAX_ROWS = 200
_MAX_SKIPPED = 50
_STATISTICS = ("min", "max", "absmax", "mean", "std")
_COUNTS = ("nan", "inf", "zero")
_SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
_NUMBERS = ("records", "raw", *_STATISTICS, *_COUNTS, *(f"{share:.0%}" for share in _SHARES))
_ERRORS = ("count", "SQNR dB", "relative", "cosine", "underflow", "saturation", "flush")
_LOSSES = ("underflow", "saturation")
_USE = ("values", "share", "codes", "in use", "mean error", "relative", "SQNR dB")
_OUTSIDE = ("above", "below", "subnormal", "below, scaled", "NaN, Inf")
Row = Mapping[str, Any]


def report_lines(plain: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a document (`capd.report.document`), skipped records first."""
    whole, skipped = plain["all"], plain["skipped"]
    yield f"{MARK} of {', '.join(plain['sources'])}"
    size = f"{human_nbytes(whole['raw_bytes'])}, {human_count(whole['count'], 'element')}"
    yield f"{human_count(whole['records'], 'record')}, {size}"
    if skipped:
        yield ""
        yield f"skipped: {human_count(len(skipped))}"
        yield from (f"  {one['name']}: {one['reason']}" for one in skipped[:_MAX_SKIPPED])
        yield from _more(len(skipped) - _MAX_SKIPPED)
    without = plain["without_statistics"]
    if without:
        yield f"{human_count(without)} records have no stored statistics; their values are left out"
    if plain["sample"] is not None:
        yield f"sample: {phrase_text(sample_phrase(plain['sample']))}"
    yield "quantiles: none, no element was read (--quick)" if plain["quick"] else _about_quantiles(whole)
    yield from _verdict(plain["verdict"], plain["sources"])
    yield from _alerts(plain["alerts"])
    yield from _scalars(plain["scalars"])
    for fields in GROUPINGS:
        yield ""
        yield from _groups(fields, grouped(plain, fields))
    yield from _errors(grouped(plain, BY_TENSOR))
    yield from _formats(plain)


def _verdict(verdict: Row, sources: Sequence[str]) -> Iterator[str]:
    """Yield the verdict, nothing if no format was measured."""
    if not verdict["formats"]:
        return
    yield ""
    if len(sources) > 1:
        yield f"the verdict is on the records of {human_count(len(sources), 'run')} together"
    yield from (one["text"] for one in verdict["statements"])
    rows = [
        (
            name, one["format"], f"{one['bits_per_value']:g}", human_count(errors["count"]),
            *(_decibels(errors, level) for level in ("tenth_sqnr_db", "median_sqnr_db", "sqnr_db")),
            human_count(errors["lost"]), *(_percent(errors[f"{share}_percent"]) for share in _LOSSES),
            "best" if best else "",
        )
        for name, one, best, errors in verdict_rows(verdict)
    ]  # fmt: skip
    yield ""
    numbers = ("bits", "count", "9 of 10, dB", "median dB", "SQNR dB", "lost", *_LOSSES)
    yield from table_lines(("verdict on", "format", *numbers, ""), rows, numbers)
    if verdict["calls"] is not None and verdict["calls"]["found"]:
        yield f"Y, dX, dW: products of quantised operands, of {calls_text(verdict)}"
    worst = [
        (
            one["series"], one["role"], one["format"], _decibels(one), human_count(one["lost"]),
            *(_percent(one[f"{share}_percent"]) for share in _LOSSES),
        )
        for one in verdict["worst"]
    ]  # fmt: skip
    if worst:
        yield ""
        yield from table_lines(("worst tensors", "role", "format", *numbers[4:]), worst, numbers)


def _alerts(found: Sequence[Row]) -> Iterator[str]:
    """Yield a row for each alert, the first of them first."""
    if not found:
        return
    rows = [
        (
            printable(one["rule"]), one["severity"], str(one["rank"]), f"{one['iteration']:,}",
            one["value"] if isinstance(one["value"], str) else f"{one['value']:.6g}", f"{one['count']:,}",
            printable(one["series"]),
        )
        for one in found[:_MAX_ROWS]
    ]  # fmt: skip
    yield from ("", human_count(len(found), "alert"))
    headers = ("rule", "severity", "rank", "iteration", "value", "series", "first series")
    yield from table_lines(headers, rows, headers[2:6])
    yield from _more(len(found) - _MAX_ROWS)


def _scalars(lines: Sequence[Row]) -> Iterator[str]:
    """Yield a row for each scalar: its mean in the first and the last iteration, and its extremes."""
    if not lines:
        return
    rows = [
        (
            line["name"],
            f"{line['ranks']:,}",
            f"{line['iteration'][0]:,} to {line['iteration'][-1]:,}",
            *(
                f"{number:.6g}"
                for number in (line["mean"][0], line["mean"][-1], min(line["min"]), max(line["max"]))
            ),
        )
        for line in lines[:_MAX_ROWS]
    ]
    yield from ("", "scalars, as means over ranks and micro-batches")
    yield from table_lines(("scalar", "ranks", "iterations", "first", "last", "min", "max"), rows)
    yield from _more(len(lines) - _MAX_ROWS)


def _about_quantiles(whole: Row) -> str:
    about = (
        "quantiles are within 2^-8 of their value: some elements have more than 16 bits"
        if whole["quantiles_exact"] is False
        else "quantiles are exact"
    )
    return f"{about}; by quant type, tensor and layer they are within 2^-5 of their value"


def _groups(fields: Fields, groups: Sequence[Row]) -> Iterator[str]:
    rows = [
        (
            *([human_value(one[name]) for name in fields] or [""]),
            human_count(one["records"]),
            human_nbytes(one["raw_bytes"]),
            *(_number(one[name]) for name in _STATISTICS),
            *(human_count(one[name]) for name in _COUNTS),
            *(_number((one["quantiles"] or {}).get(str(share))) for share in _SHARES),
        )
        for one in groups[:_MAX_ROWS]
    ]
    yield from table_lines((*(fields or ("all",)), *_NUMBERS), rows, _NUMBERS)
    yield from _more(len(groups) - _MAX_ROWS)


def _more(count: int) -> Iterator[str]:
    if count > 0:
        yield f"… and {human_count(count)} more: global_statistics.json has all"


def _errors(groups: Sequence[Row]) -> Iterator[str]:
    """Yield the errors by quant type, tensor name and format, nothing if no format was measured."""
    rows = [
        (
            *(human_value(one[name]) for name in BY_TENSOR), label, human_count(errors["count"]),
            _decibels(errors), _share(errors["relative"]), _number(errors["cosine"], ".6f"),
            *(_percent(errors[f"{name}_percent"]) for name in ("underflow", "saturation", "flush")),
        )
        for one in groups
        for label, errors in one["errors"].items()
    ]  # fmt: skip
    if rows:
        yield ""
        yield from table_lines(("error of", "tensor_name", "format", *_ERRORS), rows, _ERRORS)


def _formats(plain: dict[str, Any]) -> Iterator[str]:
    """Yield the use of HiFloat8 and the values outside of formats' ranges, nothing if no element was read."""
    if not plain["hifp8"]:
        return
    yield ""
    rows = [row for use in plain["hifp8"] for row in _use_rows(use)]
    yield from table_lines(("HiFP8 of", "regime", *_USE), rows, _USE)
    yield ""
    rows = [(human_value(one["quant_type"]), one["format"], *_outside(one)) for one in plain["overflow"]]
    yield from table_lines(("overflow of", "format", *_OUTSIDE, "overflow", "underflow"), rows, _OUTSIDE)


def _use_rows(use: Row) -> Iterator[tuple[str, ...]]:
    whole = {
        **use,
        "regime": "all",
        "count": use["finite"],
        "share": float(use["finite"] > 0),
        "codes": FINITE_CODES,
    }
    for one in (*use["regimes"], whole):
        yield (
            human_value(use["quant_type"]), one["regime"], human_count(one["count"]), _share(one["share"]),
            str(one["codes"]), str(one["codes_used"]), _number(one["mean_error"], ".4g"),
            _share(one["relative_error"]), _decibels(one),
        )  # fmt: skip


def _outside(one: Row) -> Iterator[str]:
    counts = (one["above"], one["below"], one["flushed"], one["below_scaled"], one["nan"] + one["inf"])
    yield from (_percent(100 * number / one["count"] if one["count"] else None) for number in counts)
    yield from (one["above_severity"], one["below_severity"])


def _decibels(one: Row, name: str = "sqnr_db") -> str:
    return _number(one[name], ".2f")


def _share(share: float | None) -> str:
    return _percent(None if share is None else 100 * share)


def _percent(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.4g} %"


def _number(value: float | None, digits: str = ".6g") -> str:
    return "-" if value is None else f"{value:{digits}}"
