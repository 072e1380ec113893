"""Texts that take a known number of columns in a terminal, and numbers that take few."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from capd_client.process.text import human_nbytes, printable

__all__ = ["amount", "count", "cut_at", "duration", "fit", "fit_name", "safe", "spark", "speed", "width_of"]

_MARKS = ("Mn", "Me")
_LEVELS = "▁▂▃▄▅▆▇█"
_UNITS = ("", "k", "M", "G", "T")


@lru_cache(8192)
def safe(text: str) -> str:
    """Return a name from outside without what a terminal interprets, and without characters that take no column."""
    shown = printable(text)
    if shown.isascii():
        return shown
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) in _MARKS else char for char in shown
    )


def width_of(text: str) -> int:
    """Return the columns that a text takes. Chinese characters take two."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return a text that takes exactly `width` columns: filled with spaces, or cut off with an ellipsis."""
    if width <= 0:
        return ""
    taken = width_of(text)
    if taken > width:
        text = f"{_head(text, width - 1)}…"
        taken = width_of(text)
    gap = " " * (width - taken)
    return gap + text if right else text + gap


def fit_name(text: str, width: int) -> str:
    """Return a name as `fit` does, but cut in its middle: its end says more than its beginning."""
    if width_of(text) <= width or width < 8:
        return fit(text, width)
    tail = (width - 1) * 2 // 3
    return fit(f"{_head(text, width - 1 - tail)}…{_head(text[::-1], tail)[::-1]}", width)


def cut_at(text: str, width: int) -> tuple[str, str]:
    """Return what of a text lies before a column, and what lies after it. A character across it is in neither."""
    head = _head(text, width)
    rest = text[len(head) :]
    return head, rest if width_of(head) == width else rest[1:]


def _head(text: str, width: int) -> str:
    taken = 0
    for at, char in enumerate(text):
        taken += width_of(char)
        if taken > width:
            return text[:at]
    return text


def count(number: int) -> str:
    """Return a count in at most seven characters: 12,345, then 1.23M."""
    return f"{number:,}" if number < 1_000_000 else _scaled(number)


def speed(number: float | None) -> str:
    """Return a rate in at most five characters; a dash if it is unknown."""
    if number is None or not math.isfinite(number):
        return "-"
    if number < 9.95:
        return f"{number:.1f}" if number else "0"
    return f"{number:.0f}" if number < 9999.5 else _scaled(number)


def _scaled(number: float) -> str:
    power = 0
    while number >= 999.5 and power < len(_UNITS) - 1:
        number /= 1000
        power += 1
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}{_UNITS[power]}"


def amount(nbytes: float | None) -> str:
    """Return a size for people; a dash if it is unknown."""
    return "-" if nbytes is None else human_nbytes(max(0.0, nbytes))


def duration(seconds: float) -> str:
    """Return a time for people with at most two units: 45 s, 12 min, 3 h 20 min, 5 d 2 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    days = whole // 86400
    return f"{days} d {whole % 86400 // 3600} h" if days < 1000 else "years"


def spark(values: Sequence[float | None]) -> str:
    """Return a character for each value, scaled to the largest; a space where nothing is known."""
    most = max((value for value in values if value is not None), default=0.0)
    if most <= 0:
        return "".join(" " if value is None else _LEVELS[0] for value in values)
    top = len(_LEVELS) - 1
    return "".join(
        " " if value is None else _LEVELS[max(0, min(top, math.ceil(value / most * top)))] for value in values
    )
