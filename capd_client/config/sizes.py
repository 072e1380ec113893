"""Sizes and amounts of disk space as users write them, for every setting: bytes, "200GB", "512MiB", "10%"."""

from __future__ import annotations

import os
import re

__all__ = ["amount_nbytes", "default_max_disk", "parse_amount", "parse_size"]

_SIZE_HELP = (
    "write bytes, or a number with KB, MB, GB, TB, PB (powers of 1000) or KiB … PiB (of 1024): 2GB, 512MiB"
)
_POWERS = {letter: power for power, letter in enumerate("kmgtp", start=1)}
_SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*(?:([kmgtp])(i?))?(b?)", re.IGNORECASE)
_DEFAULT_MAX_DISK = 200 * 10**9
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_AMOUNT_HELP = f"{_SIZE_HELP}; or a percentage of the file system: 10%"


def parse_size(value: object) -> int:
    """Bytes: an int as it is, text with or without a unit. Parts of a byte are cut off; plain bytes have none.

    Raises ValueError, saying what is accepted, for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size; {_SIZE_HELP}")
    whole, part, letter, binary, byte = match.groups()
    if (letter and not byte) or (part and not letter):  # "2G" might be meant either way
        raise ValueError(f"{value!r} is not a size; {_SIZE_HELP}")
    unit = (1024 if binary else 1000) ** _POWERS[letter.lower()] if letter else 1
    return int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)


def parse_amount(value: object) -> int | float:
    """Read an amount: a size in bytes, or a float in [0, 1], that fraction of the file system ("10%" is 0.1).

    Raises ValueError, saying what is accepted, for anything else.
    """
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    share = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if share is None:
        try:
            return parse_size(value)
        except ValueError:
            raise ValueError(f"{value!r} is not a size; {_AMOUNT_HELP}") from None
    if float(share[1]) > 100:
        raise ValueError(f"{value!r} is more than 100%; {_AMOUNT_HELP}")
    return float(share[1]) / 100


def amount_nbytes(amount: int | float, file_system_nbytes: int) -> int:
    """A parsed amount in bytes, on a file system of the given total size."""
    return int(amount * file_system_nbytes) if isinstance(amount, float) else amount


def default_max_disk(root: str | os.PathLike[str]) -> int:
    """min(200 GB, half of what is free now on the file system of `root`), in bytes."""
    found = os.statvfs(root)
    return min(_DEFAULT_MAX_DISK, found.f_bavail * found.f_frsize // 2)
