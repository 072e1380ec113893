"""Sizes as users write them, for every setting of job, daemon and command line: bytes, "200GB", "512MiB"."""

from __future__ import annotations

import re

__all__ = ["SIZE_HELP", "parse_size"]

SIZE_HELP = (
    "write bytes, or a number with KB, MB, GB, TB, PB (powers of 1000) or KiB … PiB (of 1024): 2GB, 512MiB"
)
_POWERS = {letter: power for power, letter in enumerate("kmgtp", start=1)}
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*(?:([kmgtp])(i?))?(b?)", re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes: an int as it is, text with or without a unit. Parts of a byte are cut off; plain bytes have none.

    Raises ValueError, saying what is accepted, for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size; {SIZE_HELP}")
    whole, part, letter, binary, byte = match.groups()
    if (letter and not byte) or (part and not letter):  # "2G" might be meant either way
        raise ValueError(f"{value!r} is not a size; {SIZE_HELP}")
    unit = (1024 if binary else 1000) ** _POWERS[letter.lower()] if letter else 1
    return int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)
