"""Tables for people: they fit the terminal, their numbers have three digits and one unit a column.

Where stdout is no terminal, nothing is shortened or left out, so that pipes find every character.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from textwrap import TextWrapper
from unicodedata import east_asian_width

from capd.cli.output import note, print_lines
from capd_client.process.text import printable

__all__ = [
    "Column",
    "TextTables",
    "aligned",
    "drawn",
    "fitted",
    "in_one_unit",
    "note_left_out",
    "print_columns",
    "prose",
]

_GAP = "  "
# A shortened name keeps its beginning and its end.
_LEAST_NAME = 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COLOURS = {"bold": "1", "red": "31", "green": "32"}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: The header.
        cells: The cell of each row.
        right: Whether cells are aligned to the right.
        is_name: Whether a cell may be shortened in the middle.
        spare: In a narrow terminal, the column with the largest number is left out first; 0: never.
    """

    name: str
    cells: Sequence[str]
    right: bool = False
    is_name: bool = False
    spare: int = 0

    @property
    def width(self) -> int:
        """The width of the widest cell."""
        return max(map(_width, (self.name, *self.cells)))


def print_columns(
    columns: Sequence[Column], *, wide: bool = False, colours: Sequence[str] = ()
) -> Sequence[str]:
    """Print a table, and name on stderr the columns that did not fit. Return their names, as `drawn` does."""
    lines, left_out = drawn(columns, wide=wide, colours=colours)
    print_lines(lines)
    note_left_out(left_out)
    return left_out


def note_left_out(names: Sequence[str]) -> None:
    """Name on stderr the columns that did not fit, if there are any."""
    if names:
        note(f"left out to fit the terminal: {', '.join(names)}; --wide shows all columns")


def drawn(
    columns: Sequence[Column], *, wide: bool = False, colours: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the lines of a table for stdout, and the names of the columns that do not fit it.

    Args:
        columns: The columns.
        wide: Whether nothing is shortened or left out in a terminal, too.
        colours: A colour for each row, "" for none.
    """
    (header, *rows), left_out = fitted(columns, None if wide else _terminal_width())
    shades = colours or [""] * len(rows)
    shown = [_painted(row, shade) for row, shade in zip(rows, shades, strict=True)]
    return [_painted(header, "bold"), *shown], left_out


class _TableLine(str):
    """A line of a table among lines of words. `prose` does not wrap it."""

    __slots__ = ()


class TextTables:
    """Draws tables of text that fit the terminal, as `table_lines` does where nothing has to.

    Attributes:
        left_out: The names of the columns that did not fit.
    """

    def __init__(self, names: Iterable[str], spare: Sequence[str] = (), *, wide: bool = False) -> None:
        """Prepare the drawing.

        Args:
            names: The headers of the columns whose cells may be shortened.
            spare: The headers of the columns that may be left out, the first of them first.
            wide: Whether nothing is shortened or left out in a terminal, too.
        """
        self._names, self._spare, self._wide = frozenset(names), tuple(spare), wide
        self.left_out: list[str] = []

    def __call__(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[str] = ()
    ) -> list[str]:
        """Return the lines of one table. The arguments are those of `table_lines`."""
        to_right = frozenset(right)
        columns = [
            Column(
                name, [row[at] for row in rows], name in to_right, name in self._names, self._spare_of(name)
            )
            for at, name in enumerate(header)
        ]
        lines, left_out = drawn(columns, wide=self._wide)
        self.left_out += [name for name in left_out if name not in self.left_out]
        return [*map(_TableLine, lines)]

    def note_left_out(self) -> None:
        """Name on stderr the columns that did not fit, if there are any."""
        note_left_out(self.left_out)

    def _spare_of(self, name: str) -> int:
        return len(self._spare) - self._spare.index(name) if name in self._spare else 0


def prose(lines: Iterable[str], indent: int, *, wide: bool = False) -> list[str]:
    """Return lines of words, wrapped between words to fit the terminal. A word that does not fit stays whole.

    Args:
        lines: The lines. Those of `TextTables` stay whole, and one with a single word after its label, so that it
            can be copied.
        indent: The columns of the label, which the further rows of a line leave empty.
        wide: Whether nothing is wrapped.
    """
    width = None if wide else _terminal_width()
    if width is None:
        return list(lines)
    wrapper = TextWrapper(
        max(width, indent + _LEAST_NAME), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip

    def rows(line: str) -> list[str]:
        stays = isinstance(line, _TableLine) or " " not in line[indent:]
        return [line] if stays else wrapper.wrap(line)

    return [row for line in lines for row in rows(line)]


def _terminal_width() -> int | None:
    """Return the width of the terminal, None if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _painted(text: str, colour: str) -> str:
    """Return text in a colour, if there is one, where stdout is a terminal and NO_COLOR is not set (https://no-color.org)."""
    if (
        not colour
        or not sys.stdout.isatty()
        or os.environ.get("NO_COLOR")
        or os.environ.get("TERM") == "dumb"
    ):
        return text
    return f"\033[{_COLOURS[colour]}m{text}\033[0m"


def fitted(columns: Sequence[Column], width: int | None) -> tuple[list[str], list[str]]:
    """Return the lines of a table of at most this width, and the names of the columns that were left out.

    Columns are left out if names of 16 characters would not be enough. A table that is still too wide stays so. Names
    of a store may come from anybody, so no cell has a character that a terminal could interpret.
    """
    shown, left_out = [replace(column, cells=list(map(printable, column.cells))) for column in columns], []
    while width is not None and _least(shown) > width:
        spare = max(shown, key=lambda column: column.spare)
        if not spare.spare:
            break
        shown.remove(spare)
        left_out.append(spare.name)
    widths = [column.width for column in shown]
    if width is not None:
        _narrow(shown, widths, width - len(_GAP) * (len(shown) - 1))
    rows = [
        [_fit(cell, column, room) for cell in (column.name, *column.cells)]
        for column, room in zip(shown, widths, strict=True)
    ]
    return [_GAP.join(row).rstrip() for row in zip(*rows, strict=True)], left_out


def _least(columns: Sequence[Column]) -> int:
    widths = [min(column.width, _LEAST_NAME) if column.is_name else column.width for column in columns]
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _narrow(columns: Sequence[Column], widths: list[int], room: int) -> None:
    """Take from the widest names what the table is too wide."""
    names = [at for at, column in enumerate(columns) if column.is_name]
    for _ in range(max(0, sum(widths) - room)):
        widest = max(names, key=lambda at: widths[at], default=None)
        if widest is None or widths[widest] <= _LEAST_NAME:
            return
        widths[widest] -= 1


def _fit(cell: str, column: Column, width: int) -> str:
    if _width(cell) > width:
        # The end of a module's name says more than its beginning.
        tail = (width - 1) * 2 // 3
        cell = f"{_head(cell, width - 1 - tail)}…{_head(cell[::-1], tail)[::-1]}"
    gap = " " * (width - _width(cell))
    return gap + cell if column.right else cell + gap


def _head(text: str, width: int) -> str:
    """Return the beginning of a text, of at most this width."""
    room = list(accumulate(map(_width, text)))
    return text[: bisect_right(room, width)]


def _width(text: str) -> int:
    """Return the columns that a text takes in a terminal: Chinese characters take two."""
    return len(text) + (0 if text.isascii() else sum(east_asian_width(char) in "WF" for char in text))


def aligned(values: Sequence[float | None], digits: int = 3) -> list[str]:
    """Return numbers with so many significant digits and their points below each other; None as a dash.

    Numbers below 0.0001 or from a million on, infinities and NaN have no common point.
    """
    texts = [_rounded(value, digits) for value in values]
    plain = [text for text in texts if _has_place(text)]
    after = max((len(text.partition(".")[2]) for text in plain), default=0)
    pad = after + (1 if after else 0)
    return [text.ljust(len(text.partition(".")[0]) + pad) if _has_place(text) else text for text in texts]


def _rounded(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    # The digits are counted after rounding: 99.96 has three of them as 100.
    places = max(0, digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}")))))
    text = f"{value:.{places}f}"
    return text.partition(".")[0] if value == int(value) else text


def _has_place(text: str) -> bool:
    return text[-1].isdigit() and "e" not in text


def in_one_unit(sizes: Sequence[int]) -> tuple[str, list[str]]:
    """Return the unit of the largest size, and all sizes in it, with points below each other."""
    largest = max(sizes, default=0)
    power = min(len(_UNITS) - 1, max(0, (largest.bit_length() - 1) // 10))
    # 1,000 KiB and more are shown as 0.98 MiB.
    if power + 1 < len(_UNITS) and largest >= 1000 * 1024**power:
        power += 1
    return _UNITS[power], aligned([size / 1024**power for size in sizes])
