"""Which steps and which modules are captured: ranges like "0-2,100-:100" and name globs. No torch."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple, Optional

from capd_client.errors import ConfigError

__all__ = ["Ranges", "matches_any"]

_PART = re.compile(r"(?P<first>\d+)(?P<dash>-)?(?P<last>\d+)?(?::(?P<stride>\d+))?\Z")


class _Part(NamedTuple):
    first: int
    last: Optional[int]  # None: open
    stride: int


class Ranges:
    """A set of non-negative integers: "all", or parts "3", "0-2", "100-", "100-:100", "0-90:10" joined by commas.

    Raises ConfigError for anything else, naming the part that is wrong. Empty text selects nothing.
    """

    __slots__ = ("_parts", "text")

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self._parts = tuple(_parse(part.strip()) for part in self.text.split(",") if part.strip())

    def __contains__(self, number: int) -> bool:
        for first, last, stride in self._parts:
            if number >= first and (last is None or number <= last) and (number - first) % stride == 0:
                return True
        return False

    def __repr__(self) -> str:
        return f"Ranges({self.text!r})"


def _parse(part: str) -> _Part:
    if part == "all":
        return _Part(0, None, 1)
    match = _PART.match(part)
    if match is None:
        raise ConfigError(f'cannot read {part!r} as a range; write "all", "3", "0-2", "100-" or "100-:100"')
    first = int(match["first"])
    stride = int(match["stride"] or 1)
    last = int(match["last"]) if match["last"] else None if match["dash"] or match["stride"] else first
    if match["last"] and not match["dash"]:
        raise ConfigError(f"cannot read {part!r} as a range")
    if stride == 0 or (last is not None and last < first):
        raise ConfigError(f"range {part!r} is empty: the end lies before the start, or the stride is 0")
    return _Part(first, last, stride)


def matches_any(name: str, globs: tuple[str, ...]) -> bool:
    """Whether `name` matches one of the globs (case-sensitive, `*` also matches dots)."""
    return any(fnmatchcase(name, glob) for glob in globs)
