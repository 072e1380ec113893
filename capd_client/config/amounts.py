"""Amounts of disk space as users write them: a size (`capd_client.config.sizes`), or a share of the file system, "10%"."""

from __future__ import annotations

import os
import re

from capd_client.config.sizes import SIZE_HELP, parse_size

__all__ = ["amount_nbytes", "default_max_disk", "parse_amount"]

_DEFAULT_MAX_DISK = 200 * 10**9
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_HELP = f"{SIZE_HELP}; or a percentage of the file system: 10%"


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
            raise ValueError(f"{value!r} is not a size; {_HELP}") from None
    if float(share[1]) > 100:
        raise ValueError(f"{value!r} is more than 100%; {_HELP}")
    return float(share[1]) / 100


def amount_nbytes(amount: int | float, file_system_nbytes: int) -> int:
    """A parsed amount in bytes, on a file system of the given total size."""
    return int(amount * file_system_nbytes) if isinstance(amount, float) else amount


def default_max_disk(root: str | os.PathLike[str]) -> int:
    """min(200 GB, half of what is free now on the file system of `root`), in bytes."""
    found = os.statvfs(root)
    return min(_DEFAULT_MAX_DISK, found.f_bavail * found.f_frsize // 2)
