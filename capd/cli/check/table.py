"""The table of a check, the products beyond a limit, and the lines below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capd.cli.output import human_count, print_lines
from capd.cli.table import Column, aligned, print_columns, prose
from capd_client.process.text import human_value

__all__ = ["print_check"]

Row = Mapping[str, Any]
_TITLES = {"y": "Y", "dx": "dX", "dw": "dW", "o": "O"}
_NAMED = 20


def print_check(document: Row, *, wide: bool) -> None:
    """Print a row for each group and product, then the products beyond a limit."""
    fields = document["by"]
    groups = document["groups"] or [{"products": document["all"]}]
    rows = [
        ([human_value(group[name]) for name in fields], product, numbers)
        for group in groups
        for product, numbers in group["products"].items()
    ]
    numbers = [one for *_, one in rows]
    columns = [
        *(Column(name, [place[at] for place, *_ in rows], is_name=True) for at, name in enumerate(fields)),
        Column("product", [_TITLES[product] for _, product, _ in rows]),
        Column("checked", [human_count(one["checked"]) for one in numbers], right=True),
        Column("beyond", [human_count(one["beyond"]) for one in numbers], right=True),
        Column("error eps", aligned([one["error"] for one in numbers]), right=True),
        Column("worst row eps", aligned([one["row_error"] for one in numbers]), right=True),
    ]
    print_columns(columns, wide=wide, colours=["red" if one["beyond"] else "" for one in numbers])
    for one in document["first"][:_NAMED]:
        print_lines(["", *prose(_said(one), 2, wide=wide)])
    print_lines(["", *prose(_about(document), 0, wide=wide)])


def _said(one: Row) -> list[str]:
    """Return where a product beyond a limit is, and what is known of its error."""
    where = f"{_TITLES[one['product']]} of {one['module']}, "
    where += "samples " if isinstance(one["rank"], str) and "=" in one["rank"] else "rank "
    where += f"{human_value(one['rank'])}, iteration {one['iteration']}, micro-batch {one['micro_batch']}, "
    where += f"call {one['call']}"
    return [f"{where}: error {one['error']:.3g} eps of {one['precision']}. {' '.join(_facts(one))}"]


def _facts(one: Row) -> list[str]:
    found = []
    for kind in ("rows", "columns"):
        lines = one[kind]
        if lines["beyond"]:
            named = ", ".join(map(str, lines["first"]))
            more = ", …" if lines["beyond"] > len(lines["first"]) else ""
            found.append(
                f"{lines['beyond']:,} of {lines['of']:,} {kind} beyond the limit ({named}{more}), "
                f"worst {lines['error']:.3g} eps."
            )
    factor = one["factor"]
    # A factor that leaves most of the error explains nothing.
    if factor is not None and factor["rest"] < 0.5 * one["error"]:
        equals = f": equals {', '.join(factor['is'])}" if factor["is"] else ""
        found.append(f"× {factor['alpha']:.4f} fits best, {factor['rest']:.3g} eps are left{equals}.")
    return found


def _about(document: Row) -> list[str]:
    limits, every = document["limits"], document["all"]
    operands = "put together from all ranks" if document["operands"] == "logical" else "of each rank"
    lines = [
        f"{human_count(document['checked'], 'product')} of {human_count(document['calls'], 'call')} checked, operands "
        f"{operands}; limits {limits['tensor']:g} eps for a product, {limits['row']:g} eps for a row or column."
    ]
    lines.append(
        f"{human_count(document['beyond'], 'product')} beyond a limit."
        if document["beyond"]
        else "All are within the rounding of their dtype."
    )
    if document["beyond"] > _NAMED:
        lines.append(f"The first {_NAMED} are named; --json names up to 1,000.")
    biased, tf32 = (sum(one[name] for one in every.values()) for name in ("biased", "tf32"))
    if biased:
        lines.append(f"A bias was fitted to {human_count(biased, 'product')}, because none was captured.")
    if tf32:
        lines.append(f"{human_count(tf32, 'product')} of float32 hold in TF32 alone.")
    return lines
