"""The table of a replay, and the lines below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capd.cli.output import human_count, print_lines
from capd.cli.table import Column, aligned, print_columns, prose
from capd_client.process.text import human_value

__all__ = ["print_replay"]

Row = Mapping[str, Any]
_TITLES = {"y": "Y", "dx": "dX", "dw": "dW"}
_OPERANDS = {"x": "X", "w": "W", "g": "dY", "cross": "both", "mask": "mask"}


def print_replay(document: Row, *, wide: bool) -> None:
    """Print a row for each group, recipe and product, then what the columns mean and what was compared."""
    fields = document["by"]
    groups = document["groups"] or [{"recipes": document["all"]}]
    rows = [
        ([human_value(group[name]) for name in fields], recipe, product, numbers)
        for group in groups
        for recipe, products in group["recipes"].items()
        for product, numbers in products.items()
    ]
    columns = [
        Column(name, [place[at] for place, *_ in rows], is_name=True) for at, name in enumerate(fields)
    ]
    columns += [
        Column("recipe", [recipe for _, recipe, *_ in rows], is_name=True),
        Column("product", [_TITLES[product] for *_, product, _ in rows]),
        *_numbers([numbers for *_, numbers in rows]),
    ]
    print_columns(columns, wide=wide)
    print_lines(["", *prose(_about(document), 0, wide=wide)])


def _numbers(rows: Sequence[Row]) -> list[Column]:
    def column(title: str, values: Sequence[float | None], spare: int = 0, digits: int = 3) -> Column:
        return Column(title, aligned(values, digits), right=True, spare=spare)

    found = [
        column("SQNR dB", [one["sqnr_db"] for one in rows]),
        column("zeta", [one["zeta"] for one in rows], 2),
        column("1 - cosine", [None if one["cosine"] is None else 1 - one["cosine"] for one in rows], 4),
        column("alignment", [one["alignment"] for one in rows], 3, 5),
        column("worst row dB", [(one["worst"] or {}).get("sqnr_db") for one in rows], 1),
    ]
    if any(one["lost"] for one in rows):
        found.append(Column("lost", [human_count(one["lost"]) for one in rows], right=True))
    if any(one["draws"] for one in rows):
        draws = [one["draws"] or {} for one in rows]
        found.append(column("mean dB", [one.get("sqnr_db") for one in draws]))
        found.append(column("gain dB", [one.get("gain_db") for one in draws]))
        found.append(column("of", [one.get("ideal_db") for one in draws]))
    if any(one["blame"] for one in rows):
        for name, title in _OPERANDS.items():
            shares = [((one["blame"] or {}).get(name) or {}).get("inner") for one in rows]
            if name != "mask" or any(shares):
                percent = [None if share is None else 100 * share for share in shares]
                found.append(column(f"{title} %", percent))
    return found


def _about(document: Row) -> list[str]:
    calls = document["calls"]
    lines = [
        f"{human_count(calls['replayed'], 'call')} of {calls['found']:,} replayed, with "
        + ("logical operands." if document["operands"] == "logical" else "the operands of each rank.")
    ]
    if calls["of_some_rows"]:
        lines.append(
            f"Of {human_count(calls['of_some_rows'], 'call')}, {document['rows']:,} tokens were taken (--rows)."
        )
    if calls["partial"]:
        lines.append(f"Of {human_count(calls['partial'], 'call')}, slices of tokens were captured: no dW.")
    every = [
        (recipe, product, one)
        for recipe, products in document["all"].items()
        for product, one in products.items()
    ]
    if any(one["draws"] for *_, one in every):
        lines.append(
            f"mean dB: the SQNR of the mean of {document['draws']} draws; gain dB: what it gains over one draw, of "
            "what an unbiased product gains."
        )
    if any(one["blame"] for *_, one in every):
        lines.append(
            "X %, W %, dY %: the share of the error that follows each operand, ⟨e, d⟩ / ‖d‖²; together 100."
        )
    lines += [
        _captured(recipe, product, one["captured"]) for recipe, product, one in every if one["captured"]
    ]
    return lines


def _captured(recipe: str, product: str, found: Row) -> str:
    title = f"Captured {_TITLES[product]} against {recipe}, the recipe of the job"
    if found["biased"]:
        title = (
            f"{human_count(found['biased'], 'product')} with a bias, which is not captured, left out. {title}"
        )
        if not found["calls"]:
            return f"{title}: none to compare."
    if found["equal"] == found["values"]:
        return f"{title}: all {found['values']:,} values equal in every bit."
    return (
        f"{title}: {found['equal']:,} of {found['values']:,} values equal in every bit, the others at most "
        f"{found['max_ulp']:,} ulp apart"
        + (f", {found['nonfinite']:,} not finite." if found["nonfinite"] else ".")
    )
