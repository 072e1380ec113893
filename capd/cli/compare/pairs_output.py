"""The output of `capd compare A B`: JSON, CSV, a table, and notes about the records that were left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capd.cli.compare.request import CompareRequest, name_some, place_of, shown_metric
from capd.cli.output import human_count, human_number, note, print_lines
from capd.cli.table import Column, aligned, print_columns, prose

if TYPE_CHECKING:
    from capd.io.pairs import Matched
    from capd.io.sides import Entry
    from capd.report.differences import Differences

__all__ = ["print_differences", "say_left_out"]

_SHOWN = {
    "max_abs": "max abs", "relative": "relative", "sqnr_db": "SQNR dB", "cosine": "1 - cosine", "special": "NaN/Inf",
}  # fmt: skip
# The order in which a narrow terminal does without them.
_SPARE = {"relative": 2, "cosine": 3, "special": 1}
# The digits of scalars. Losses of two runs agree in the first ones.
_EXACT = 6
# The number of records that a line on stderr names.
_NAMED = 3
# The number of records without a counterpart that the JSON names.
_MAX_NAMES = 1000
_PAIR_COLUMNS = ("left", "right", "iteration", "micro_batch", "dtype", "different")
_GROUP_ALONE = ("pairs", "identical")


def print_differences(
    request: CompareRequest,
    found: Differences,
    pairing: Matched,
    ignored: list[str],
    counts: tuple[int, int],
    scalars: Sequence[Mapping[str, Any]],
    *,
    stopped: bool,
) -> None:
    """Print the differences as JSON, as CSV or as a table.

    Args:
        request: The options.
        found: The differences of the pairs.
        pairing: The pairs.
        ignored: The fields in which the records of a pair may differ.
        counts: The numbers of records of both sides.
        scalars: The differences of the scalars (`capd.report.scalars.scalar_differences`).
        stopped: Whether only the first divergence was looked for.
    """
    from capd.report.differences import DIFFERENCE_COLUMNS, plain_difference

    groups = [
        {**dict(zip(found.by, values, strict=True)), **plain_difference(each)}
        for values, each in found.by_group().items()
    ]
    document = {
        "left": {"source": found.left.source, "records": counts[0]},
        "right": {"source": found.right.source, "records": counts[1]},
        "ignored": ignored,
        "tolerance": found.tolerance,
        "pairs": len(pairing.pairs),
        "compared": found.whole.errors.records,
        "different": found.different,
        "complete": not (stopped and found.first is not None),
        "by": list(found.by),
        "all": plain_difference(found.whole),
        "groups": groups if found.by else [],
        "first_divergence": found.first,
        "records": found.each if found.keeps_each else None,
        "mismatched": [
            {"left": pair.left.name, "right": pair.right.name, "reason": reason}
            for pair, reason in found.mismatched
        ],
        "only_left": _plain_only(pairing.only_left),
        "only_right": _plain_only(pairing.only_right),
        "without_elements": found.left.without_elements + found.right.without_elements,
        "skipped": [{"name": one.name, "reason": one.reason} for one in found.unread],
        "scalars": list(scalars),
    }
    rows: list[dict[str, Any]] = groups
    header: tuple[str, ...] = (*found.by, *DIFFERENCE_COLUMNS)
    if found.keeps_each or stopped:
        rows = found.each if found.keeps_each else [found.first] if found.first else []
        header = (*_PAIR_COLUMNS, *(name for name in DIFFERENCE_COLUMNS if name not in _GROUP_ALONE))
    if not request.print(document, header, [[row[name] for name in header] for row in rows]):
        if found.keeps_each:
            _print_pairs(found.each, wide=request.wide)
        elif not stopped:
            _print_groups(found.by, groups, wide=request.wide)
        gap = [""] if found.keeps_each or not stopped else []
        print_lines([*gap, *prose(_summary(found, len(pairing.pairs)), 2, wide=request.wide)])
        if scalars:
            print_lines([""])
            _print_scalars(scalars, wide=request.wide)


def _print_scalars(rows: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    firsts = ["nowhere" if row["first_different"] is None else f"{row['first_different']:,}" for row in rows]
    columns = [
        Column("scalar", [row["name"] for row in rows], is_name=True),
        Column("rank", [str(row["rank"]) for row in rows], right=True),
        Column("compared", [human_count(row["compared"]) for row in rows], right=True, spare=1),
        Column("left, last", aligned([row["left_last"] for row in rows], _EXACT), right=True),
        Column("right, last", aligned([row["right_last"] for row in rows], _EXACT), right=True),
        Column("differs from iteration", firsts, right=True),
        Column("max abs", aligned([row["max_abs"] for row in rows]), right=True),
    ]
    print_columns(columns, wide=wide)


def _plain_only(entries: Sequence[Entry]) -> dict[str, Any]:
    return {"count": len(entries), "names": [entry.name for entry in entries[:_MAX_NAMES]]}


def _print_groups(fields: Sequence[str], groups: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    places = [place_of(fields, group) for group in groups]
    columns = [
        *(Column(field, [place[at] for place in places], is_name=True) for at, field in enumerate(fields)),
        Column("pairs", [human_count(group["pairs"]) for group in groups], right=True),
        Column("identical", [human_count(group["identical"]) for group in groups], right=True),
        *_numbers(groups),
    ]
    print_columns(columns, wide=wide)


def _print_pairs(each: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    columns = [
        Column("iteration", [str(row["iteration"]) for row in each], right=True),
        Column("micro_batch", [str(row["micro_batch"]) for row in each], right=True, spare=1),
        Column("record", [row["left"] for row in each], is_name=True),
        *_numbers(each),
        Column("", ["differs" if row["different"] else "" for row in each]),
    ]
    print_columns(columns, wide=wide, colours=["red" if row["different"] else "" for row in each])


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [
        Column("differ %", aligned([_differing(row) for row in rows]), right=True),
        *(
            Column(
                title,
                aligned([shown_metric(row, name) for row in rows]),
                right=True,
                spare=_SPARE.get(name, 0),
            )
            for name, title in _SHOWN.items()
        ),
    ]


def _differing(row: Mapping[str, Any]) -> float | None:
    """Return the share of unequal elements in percent. Three digits of the equal ones would be 100 too early."""
    return 100 * (row["elements"] - row["equal"]) / row["elements"] if row["elements"] else None


def _summary(found: Differences, pairs: int) -> list[str]:
    compared = found.whole.errors.records
    first = found.first
    if first is None:
        what = (
            "no bit differs"
            if not found.tolerance
            else f"none differs by more than {found.tolerance:g} of its largest value"
        )
        return [f"{human_count(compared)} of {human_count(pairs)} pairs compared: {what}"]
    unequal = human_number(_differing(first))
    numbers = ", ".join(f"{name} {human_number(shown_metric(first, key))}" for key, name in _SHOWN.items())
    return [
        f"{human_count(compared)} of {human_count(pairs)} pairs compared, {human_count(found.different)} differ",
        f"first divergence: iteration {first['iteration']}, micro-batch {first['micro_batch']}, rank {first['rank']}: "
        f"{first['left']} against {first['right']}: {unequal} % of the elements differ, {numbers}",
    ]


def say_left_out(found: Differences, pairing: Matched) -> None:
    """Name on stderr the records that were not compared."""
    if found.mismatched:
        names = [f"{pair.left.name} ({reason})" for pair, reason in found.mismatched]
        name_some("pair", "not compared, of different dtypes or shapes", names)
    for side, entries in ((found.left, pairing.only_left), (found.right, pairing.only_right)):
        if entries:
            names = [entry.name for entry in entries[:_NAMED]]
            name_some("record", f"in {side.source} alone", names, len(entries))
    statistics = found.left.without_elements + found.right.without_elements
    if statistics:
        note(f"{human_count(statistics)} records are statistics alone, which have no elements to compare")
