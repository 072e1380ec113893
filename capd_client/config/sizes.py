"""Sizes and amounts of disk space as users write them: bytes, "200GB", "512MiB", "10%"."""

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
    """Return a size in bytes: an int is returned unchanged, text may have a unit.

    Fractions of a byte are cut off. A number without a unit must be whole.

    Raises:
        ValueError: The value is no size. The message says what is accepted.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{value!r} is not a size; {_SIZE_HELP}")
    whole, part, letter, binary, byte = match.groups()
    # "2G" could be either GB or GiB.
    if (letter and not byte) or (part and not letter):
        raise ValueError(f"{value!r} is not a size; {_SIZE_HELP}")
    unit = (1024 if binary else 1000) ** _POWERS[letter.lower()] if letter else 1
    return int(whole) * unit + (int(part) * unit // 10 ** len(part) if part else 0)


def parse_amount(value: object) -> int | float:
    """Return an amount: a size in bytes as an int, or a fraction of the file system as a float ("10%" is 0.1).

    Raises:
        ValueError: The value is no amount. The message says what is accepted.
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
    """Return a parsed amount in bytes, on a file system of this total size."""
    return int(amount * file_system_nbytes) if isinstance(amount, float) else amount


def default_max_disk(root: str | os.PathLike[str]) -> int:
    """Return min(200 GB, half of the space that is free now on the file system of `root`), in bytes."""
    found = os.statvfs(root)
    return min(_DEFAULT_MAX_DISK, found.f_bavail * found.f_frsize // 2)
