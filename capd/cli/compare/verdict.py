"""The verdict of `capd compare STORE`: formats against roles of tensors, sentences, and the worst tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capd.cli.output import human_count, print_lines
from capd.cli.table import Column, aligned, print_columns, prose
from capd_client.process.text import human_value

__all__ = ["print_verdict", "verdict_table"]

Row = Mapping[str, Any]
_ABOUT = "SQNR in dB that nine of ten tensors reach, then that of the median tensor; * is the best of a role."
_SHARES = (("zero %", "underflow_percent", 2), ("sat. %", "saturation_percent", 3))


def verdict_table(verdict: Row) -> tuple[list[str], list[list[Any]]]:
    """Return the header of the CSV, and a row for each format on each role and product."""
    from capd.report.format_errors import COUNTS, METRICS
    from capd.report.verdict_document import LEVELS, verdict_rows

    numbers = (*LEVELS, *COUNTS, *METRICS)
    rows = [
        [name, one["format"], one["bits_per_value"], best, *(errors[each] for each in numbers)]
        for name, one, best, errors in verdict_rows(verdict)
    ]
    return ["role", "format", "bits_per_value", "best", *numbers], rows


def print_verdict(verdict: Row, *, wide: bool) -> None:
    """Print the table of the formats, the sentences, and the worst tensors."""
    formats: Sequence[Row] = verdict["formats"]
    if formats:
        left_out = _print_formats(verdict, wide=wide)
        about = [_ABOUT, *_about_shares(formats, left_out), *_about_products(verdict, left_out)]
        print_lines(["", *prose(about, 0, wide=wide), ""])
    print_lines(prose([one["text"] for one in verdict["statements"]], 0, wide=wide))
    if verdict["worst"]:
        print_lines(["", "The worst tensors, each in the best format of its role:"])
        _print_worst(verdict["worst"], wide=wide)


def _print_formats(verdict: Row, *, wide: bool) -> Sequence[str]:
    """Print the table of the formats. Return the names of the columns that did not fit."""
    from capd.analyze.verdict.statements import chosen_format

    formats: Sequence[Row] = verdict["formats"]
    roles = list(dict.fromkeys(name for one in formats for name in one["roles"]))
    products = list(dict.fromkeys(name for one in formats for name in one["products"]))
    chosen = chosen_format(verdict["statements"])
    columns = [
        Column("format", [one["format"] for one in formats], is_name=True),
        Column("bits", aligned([one["bits_per_value"] for one in formats]), right=True),
        *(
            Column(role, _decibels(formats, "roles", role, verdict["best"].get(role)), right=True)
            for role in roles
        ),
        *(Column(name, _decibels(formats, "products", name), right=True, spare=1) for name in products),
        *_shares(formats),
    ]
    return print_columns(
        columns, wide=wide, colours=["green" if one["format"] == chosen else "" for one in formats]
    )


def _decibels(formats: Sequence[Row], of: str, name: str, best: str | None = None) -> list[str]:
    """Return the SQNR of each format in the worst tenth, its error in a sample, a star for the best, and the median.

    Products have the worst tenth alone.
    """
    found = [one[of].get(name, {}) for one in formats]
    texts = aligned([errors.get("tenth_sqnr_db") for errors in found])
    errors_of = [errors.get("tenth_sqnr_db_error") for errors in found]
    if any(errors_of):
        texts = [f"{text} ±{_short(error)}" for text, error in zip(texts, errors_of, strict=True)]
    if of == "products":
        return texts
    stars = ["*" if one["format"] == best else " " for one in formats]
    medians = aligned([errors.get("median_sqnr_db") for errors in found])
    return [" ".join((text + star, median)) for text, star, median in zip(texts, stars, medians, strict=True)]


def _short(error: float | None) -> str:
    return "?" if error is None else f"{error:.1f}"


def _shares(formats: Sequence[Row]) -> list[Column]:
    """Return the columns of lost, underflowing and saturated values, without those that are zero everywhere."""
    from capd.report.verdict_document import percent_of

    lost = [sum(errors["lost"] for errors in one["roles"].values()) for one in formats]
    shown = [("lost", [human_count(each) for each in lost], 0)] if any(lost) else []
    for title, name, spare in _SHARES:
        shares = [percent_of(one, name) for one in formats]
        if any(shares):
            shown.append((title, aligned(shares), spare))
    return [Column(title, cells, right=True, spare=spare) for title, cells, spare in shown]


def _about_shares(formats: Sequence[Row], left_out: Sequence[str]) -> list[str]:
    shown = [column.name for column in _shares(formats) if column.name.endswith("%")]
    shown = [name for name in shown if name not in left_out]
    return [f"{' and '.join(shown)}: of the worst role."] if shown else []


def _about_products(verdict: Row, left_out: Sequence[str]) -> list[str]:
    calls = verdict["calls"]
    products = dict.fromkeys(name for one in verdict["formats"] for name in one["products"])
    shown = [name for name in products if name not in left_out]
    # Without any product, this line says why.
    if not calls or not calls["found"] or (products and not shown):
        return []
    from capd.report.verdict_document import calls_text

    return [f"{', '.join(shown) or 'Y, dX, dW'}: products of quantised operands, of {calls_text(verdict)}."]


def _print_worst(worst: Sequence[Row], *, wide: bool) -> None:
    """Print the worst tensors. Columns that tell nothing, because all cells agree or are zero, are left out."""
    names = [one["series"].rpartition("/")[2] for one in worst]
    places = [name for name in ("quant_type", "rank") if len({one[name] for one in worst}) > 1]
    # A tensor without a module has the same name in all layers.
    if len({*zip(names, *([one[place] for one in worst] for place in places), strict=True)}) < len(worst):
        places += [name for name in ("layer", "phase") if len({one[name] for one in worst}) > 1]
    columns = [
        Column("tensor", names, is_name=True),
        *(
            Column(name, [human_value(one[name]) for one in worst], right=name in ("rank", "layer"))
            for name in places
        ),
        Column("format", [one["format"] for one in worst], is_name=True),
        Column("SQNR dB", aligned([one["sqnr_db"] for one in worst]), right=True),
    ]
    if any(one["lost"] for one in worst):
        columns.append(Column("lost", [human_count(one["lost"]) for one in worst], right=True))
    for title, name, spare in _SHARES:
        if any(one[name] for one in worst):
            columns.append(Column(title, aligned([one[name] for one in worst]), right=True, spare=spare))
    print_columns(columns, wide=wide)
