"""Sizes as users write them: bytes, "200GB", "256MiB", or a share of the file system, "10%"."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["amount_nbytes", "parse_amount"]

_UNITS = {"": 1, "b": 1, "%": 0}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = 1024**_power
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|[a-z]*)\Z", re.IGNORECASE)
_HELP = "write bytes, a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, or a percentage: 200GB, 10%"


def parse_amount(value: object) -> int | float:
    """Read a size: an int is bytes, a float in [0, 1] is that fraction of the file system.

    "200GB" is decimal, "200GiB" binary, "10%" the fraction 0.1; parts of a byte are cut off.
    Raises ValueError for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    match = _AMOUNT.match(value.strip()) if isinstance(value, str) else None
    if match is None or match["unit"].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; {_HELP}")
    number, unit = Fraction(match["number"]), match["unit"].lower()
    if unit == "%":
        if number > 100:
            raise ValueError(f"{value!r} is more than 100%; {_HELP}")
        return float(number / 100)
    nbytes = number * _UNITS[unit]
    if nbytes.denominator != 1 and unit in ("", "b"):
        raise ValueError(f"{value!r} is no whole number of bytes; {_HELP}")
    return int(nbytes)


def amount_nbytes(amount: int | float, file_system_nbytes: int) -> int:
    """A parsed amount in bytes, on a file system of the given total size."""
    return int(amount * file_system_nbytes) if isinstance(amount, float) else amount
