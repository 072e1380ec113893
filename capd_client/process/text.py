"""Formats tables, sizes and counts for people, alike in the job and on the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

__all__ = ["brief", "human_count", "human_nbytes", "human_value", "number_ranges", "printable", "table_lines"]


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[str] = ()) -> list[str]:
    """Return the lines of a table with aligned columns; `right` names the columns that are aligned to the right."""
    to_right = [name in set(right) for name in header]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right_aligned else cell.ljust(width)
            for cell, width, right_aligned in zip(row, widths, to_right, strict=True)
        ).rstrip()
        for row in (header, *rows)
    ]


def human_nbytes(nbytes: float) -> str:
    """Return a size for people: 999 B, 1.5 MiB, 3.2 GiB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def human_count(count: int, noun: str = "") -> str:
    """Return a count with thousands separators, and its noun if there is one: "1 record", "2,000 records"."""
    return f"{count:,}{noun and ' '}{noun}{'s' if noun and count != 1 else ''}"


def brief(value: object) -> str:
    """Return a wrong argument for a message: the beginning of a text, or the type of anything else.

    The text of a tensor on a device would wait for the device.
    """
    return repr(value[:80]) if isinstance(value, str) else type(value).__name__


def printable(text: str) -> str:
    """Return text with a replacement for every character that a terminal could interpret."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def human_value(value: object) -> str:
    """Return the value of a field for people: "none" for None, and two quotes for an empty text."""
    return "none" if value is None else printable(str(value)) or '""'


def number_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges: 0-2, 7."""
    parts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)
