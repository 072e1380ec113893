"""Lines of the screen: spans of text with a style, each of a known width, so that two frames can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple, TypeAlias

from capd.top.text import cut_at, fit, width_of

__all__ = [
    "Line",
    "Span",
    "beside",
    "divided",
    "flow",
    "line",
    "padded",
    "plain",
    "restyled",
    "rule",
    "wrapped",
]


class Span(NamedTuple):
    """A text without line breaks, and its style: words of Rich's style language, such as "bold red"."""

    text: str
    style: str = ""


Line: TypeAlias = tuple[Span, ...]


def plain(shown: Line) -> str:
    """Return the text of a line without spaces at its end."""
    return "".join(span.text for span in shown).rstrip()


def line(text: str, width: int, style: str = "") -> Line:
    """Return a line of one span that takes exactly `width` columns."""
    return (Span(fit(text, width), style),)


def padded(shown: Line, width: int) -> Line:
    """Return a line that takes exactly `width` columns. What is too wide is cut off."""
    found: list[Span] = []
    left = width
    for span in shown:
        taken = width_of(span.text)
        if taken > left:
            if left > 0:
                found.append(Span(fit(span.text, left), span.style))
            return tuple(found)
        found.append(span)
        left -= taken
    if left:
        found.append(Span(" " * left))
    return tuple(found)


def divided(shown: Line, at: int) -> tuple[Line, Line]:
    """Return what a line has before a column of the terminal, and what it has from there on."""
    left: list[Span] = []
    right: list[Span] = []
    x = 0
    for span in shown:
        taken = width_of(span.text)
        if x + taken <= at:
            left.append(span)
        elif x >= at:
            right.append(span)
        else:
            # A character that takes two columns and lies across the cut is left out.
            head, rest = cut_at(span.text, at - x)
            left.append(Span(fit(head, at - x), span.style))
            right.append(Span(fit(rest, taken - (at - x), right=True), span.style))
        x += taken
    return tuple(left), tuple(right)


def restyled(shown: Line, style: str) -> Line:
    """Return the line with this style in place of its own."""
    return tuple(Span(span.text, style) for span in shown)


def beside(left: Sequence[Line], right: Sequence[Line], left_width: int, width: int) -> list[Line]:
    """Return two blocks beside each other, with a rule between them. They have the same number of lines."""
    room = width - left_width - 3
    return [
        (*padded(one, left_width), Span(" │ ", "dim"), *padded(other, room))
        for one, other in zip(left, right, strict=True)
    ]


def flow(items: Iterable[Line], width: int, most: int) -> list[Line]:
    """Return items one after the other in lines of `width`. No item is divided.

    Args:
        items: The items, the most important first.
        width: The columns.
        most: The most lines. Items that do not fit are left out.
    """
    found: list[list[Span]] = []
    left = 0
    for item in items:
        taken = sum(width_of(span.text) for span in item)
        if found and taken + 2 <= left:
            found[-1] += [Span("  "), *item]
            left -= taken + 2
            continue
        if len(found) == most:
            break
        found.append(list(item))
        left = width - taken
    return [padded(tuple(spans), width) for spans in found]


def facts(texts: Sequence[str], width: int, style: str = "") -> list[Line]:
    """Return short texts one after the other, in as many lines as they take."""
    return flow([(Span(text, style),) for text in texts], width, len(texts))


def rule(title: str, width: int, style: str = "dim") -> Line:
    """Return a title with a rule after it."""
    head = fit(title, min(width, width_of(title))) + " "
    return padded((Span(head, "bold"), Span("─" * max(0, width - width_of(head)), style)), width)


def wrapped(text: str, width: int, style: str = "", indent: int = 0) -> list[Line]:
    """Return a text in as many lines as it takes. Further lines are indented."""
    rows = wrap(text, max(8, width), subsequent_indent=" " * indent, break_on_hyphens=False) or [""]
    return [line(row, width, style) for row in rows]
