"""Tables of the screen: columns of fixed widths, of which a narrow terminal shows fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from capd.top.lines import Line, Span, padded
from capd.top.text import fit, fit_name

__all__ = ["TopColumn", "header_line", "row_line", "shown_columns"]

T = TypeVar("T")


@dataclass(frozen=True)
class TopColumn(Generic[T]):
    """A column of a table.

    Attributes:
        title: The header.
        width: The columns that it takes. One that grows takes the rest of the line, too.
        text: The cell of a row.
        style: The style of that cell.
        least: The width of the table from which the column is shown.
        right: Whether cells are aligned to the right.
        grows: Whether the column takes the rest of the line. It is then a name, which is cut in its middle.
        sort: The name of the order that sorts by this column.
    """

    title: str
    width: int
    text: Callable[[T], str]
    style: Callable[[T], str] = lambda _: ""
    least: int = 0
    right: bool = True
    grows: bool = False
    sort: str = ""


def shown_columns(columns: Sequence[TopColumn[T]], width: int) -> list[tuple[TopColumn[T], int]]:
    """Return the columns that a table of this width shows, each with the columns of the terminal that it takes."""
    shown = [column for column in columns if column.least <= width]
    # A space separates columns.
    rest = max(0, width - sum(column.width + 1 for column in shown) + 1)
    growing = next((column for column in shown if column.grows), None)
    return [(column, column.width + (rest if column is growing else 0)) for column in shown]


def header_line(shown: Sequence[tuple[TopColumn[T], int]], width: int, sort: str) -> Line:
    """Return the header. The column of the order in force has a mark."""
    cells = []
    for column, room in shown:
        is_sorted = bool(column.sort) and column.sort == sort
        title = f"{column.title}▾" if is_sorted else column.title
        cells.append((fit(title, room, right=column.right), "bold underline" if is_sorted else "bold"))
    return _joined(cells, width)


def row_line(shown: Sequence[tuple[TopColumn[T], int]], width: int, row: T, *, cursor: str = "") -> Line:
    """Return one row. cursor: the style of the whole row where the cursor is."""
    cells = []
    for column, room in shown:
        text = column.text(row)
        cell = fit_name(text, room) if column.grows else fit(text, room, right=column.right)
        cells.append((cell, f"{column.style(row)} {cursor}".strip()))
    found = _joined(cells, width)
    return tuple(Span(span.text, span.style or cursor) for span in found) if cursor else found


def _joined(cells: Sequence[tuple[str, str]], width: int) -> Line:
    last = len(cells) - 1
    return padded(
        tuple(Span(text if at == last else f"{text} ", style) for at, (text, style) in enumerate(cells)),
        width,
    )
