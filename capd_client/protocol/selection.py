"""Selects steps, modules and tensors: ranges like "0-2,100-:100", name globs, tensor names. No torch."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from math import gcd
from typing import Annotated, NamedTuple, Optional

import msgspec
from msgspec import Meta

from capd_client.errors import ConfigError
from capd_client.protocol.kinds import KINDS

__all__ = [
    "MAX_GLOBS", "MAX_GLOB_CHARS", "MAX_RANGE_CHARS", "TENSORS", "Ranges", "Selection",
    "matches_any",
]  # fmt: skip

TENSORS = tuple(dict.fromkeys(name for kind in KINDS for name in kind.tensors))

MAX_RANGE_CHARS = 256
MAX_GLOBS = 64
MAX_GLOB_CHARS = 256

_PART = re.compile(r"(?P<first>\d+)(?P<dash>-)?(?P<last>\d+)?(?::(?P<stride>\d+))?\Z")


class _Part(NamedTuple):
    first: int
    # None is open.
    last: Optional[int]
    stride: int


class Ranges:
    """A set of non-negative integers: "all", or parts "3", "0-2", "100-", "100-:100", "0-90:10" joined by commas.

    Raises ConfigError for any other text; the message names the wrong part. Empty text selects nothing.
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

    def reaches(self, number: int) -> bool:
        """Whether a member is `number` or greater."""
        return any(
            last is None or first + (last - first) // stride * stride >= number
            for first, last, stride in self._parts
        )

    def first_from(self, number: int) -> Optional[int]:
        """Return the smallest member that is not less than `number`; None if there is none."""
        found = (
            (first + max(0, -(-(number - first) // stride)) * stride, last)
            for first, last, stride in self._parts
        )
        return min((member for member, last in found if last is None or member <= last), default=None)

    def meets(self, other: Ranges) -> bool:
        """Whether some number is in both."""
        return any(_meet(one, two) for one in self._parts for two in other._parts)

    def beyond(self, count: int) -> Optional[int]:
        """Return a number in the text that is not below `count`; None if there is none."""
        for first, last, _ in self._parts:
            named = first if last is None else last
            if named >= count:
                return named
        return None

    def __repr__(self) -> str:
        return f"Ranges({self.text!r})"


def _meet(one: _Part, two: _Part) -> bool:
    """Whether two arithmetic progressions share a member (Chinese remainder theorem)."""
    common = gcd(one.stride, two.stride)
    if (two.first - one.first) % common:
        return False
    steps = (two.first - one.first) // common * pow(one.stride // common, -1, two.stride // common)
    every = one.stride * two.stride // common
    # The progressions share this member and every one that is `every` away. It may be below or above both starts.
    member = one.first + one.stride * steps
    begin = max(one.first, two.first)
    member = begin + (member - begin) % every
    return all(last is None or member <= last for last in (one.last, two.last))


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
        raise ConfigError(f"range {part!r} is empty: the end is before the start, or the stride is 0")
    return _Part(first, last, stride)


def matches_any(name: str, globs: tuple[str, ...]) -> bool:
    """Whether `name` matches one of the globs (case-sensitive, `*` also matches dots)."""
    return any(fnmatchcase(name, glob) for glob in globs)


_RangeText = Annotated[str, Meta(max_length=MAX_RANGE_CHARS)]
_Glob = Annotated[str, Meta(max_length=MAX_GLOB_CHARS)]
_TensorName = Annotated[str, Meta(max_length=max(map(len, TENSORS)))]


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A selection that replaces the selection of every `watch` of a job. None leaves a part as the job says.

    Attributes:
        steps, micro_batches, ranks: Ranges.
        modules: Globs over qualified module names without wrappers.
        tensors: Names from TENSORS.
    """

    steps: Optional[_RangeText] = None
    micro_batches: Optional[_RangeText] = None
    ranks: Optional[_RangeText] = None
    modules: Optional[Annotated[tuple[_Glob, ...], Meta(max_length=MAX_GLOBS)]] = None
    tensors: Optional[Annotated[tuple[_TensorName, ...], Meta(max_length=len(TENSORS))]] = None

    def check(self) -> None:
        """Raise ConfigError, with the accepted values, for a part that cannot be read or selects nothing."""
        for name in ("steps", "micro_batches", "ranks"):
            text = getattr(self, name)
            if text is not None:
                check_range(name, text)
        if self.modules is not None:
            check_globs(self.modules)
        if self.tensors is not None:
            _check_tensors(self.tensors)


def check_range(name: str, text: str) -> None:
    if len(text) > MAX_RANGE_CHARS:
        raise ConfigError(f"{name}: a range has at most {MAX_RANGE_CHARS} characters, this one {len(text)}")
    try:
        empty = not Ranges(text).reaches(0)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    if empty:
        raise ConfigError(f'{name}: an empty range selects nothing; write "all", "3", "0-2" or "100-:100"')


def check_globs(globs: tuple[str, ...]) -> None:
    if not 0 < len(globs) <= MAX_GLOBS:
        raise ConfigError(f'modules: 1 to {MAX_GLOBS} globs like "layers.*.mlp.*", not {len(globs)}')
    for glob in globs:
        if not 0 < len(glob) <= MAX_GLOB_CHARS or not glob.isprintable():
            raise ConfigError(
                f"modules: {glob[:MAX_GLOB_CHARS]!r} is no glob; it has 1 to {MAX_GLOB_CHARS} printable characters"
            )


def _check_tensors(names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in TENSORS]
    if unknown or not names:
        listed = ", ".join(map(repr, unknown[:3])) or "nothing"
        raise ConfigError(f"tensors: {listed} given; known: {', '.join(TENSORS)}")
