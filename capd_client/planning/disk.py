"""The disk for a plan's captures: its free bytes, and the bytes that capd may use. No torch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Optional

from capd_client.config.file import read_toml
from capd_client.config.sizes import amount_nbytes, default_max_disk, parse_amount, parse_size
from capd_client.errors import ConfigError

__all__ = ["disk_plan", "disk_settings", "run_max_setting", "write_speed"]

_KEEP_FREE = 0.1
_TRIAL_NBYTES = 64 << 20


def disk_settings(environ: Mapping[str, str]) -> tuple[str, Optional[Any], Any]:
    """Return store, max_disk and keep_free, from variables or else from the daemon's table in capd.toml.

    Raises:
        ConfigError: A value or the file cannot be read.
    """
    table = _daemon_table(environ.get("CAPD_CONFIG") or "capd.toml")
    store = environ.get("CAPD_STORE") or environ.get("TENSOR_SAVE_DIR") or table.get("store") or "captures"
    try:
        max_disk, keep_free = (
            None if value is None else parse_amount(value)
            for name in ("max_disk", "keep_free")
            for value in [environ.get(f"CAPD_{name.upper()}") or table.get(name)]
        )
    except ValueError as error:
        raise ConfigError(f"max_disk (CAPD_MAX_DISK), keep_free (CAPD_KEEP_FREE): {error}") from None
    return str(store), max_disk, _KEEP_FREE if keep_free is None else keep_free


def run_max_setting(environ: Mapping[str, str]) -> Optional[int]:
    """Return the bytes that a run may take, from the variable or else from [quota] in capd.toml; None: no limit.

    Raises:
        ConfigError: The value or the file cannot be read.
    """
    table = _daemon_table(environ.get("CAPD_CONFIG") or "capd.toml", "quota")
    value = environ.get("CAPD_RUN_MAX") or table.get("run_max")
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise ConfigError(f"run_max (CAPD_RUN_MAX): {error}") from None


def _daemon_table(path: str, name: str = "daemon") -> Mapping[str, Any]:
    try:
        table = read_toml(os.path.expanduser(path)).get(name)
    except FileNotFoundError:
        return {}
    return table if isinstance(table, dict) else {}


def disk_plan(
    store: str, max_disk: Optional[Any], keep_free: Any, run_max: Optional[int] = None
) -> dict[str, Any]:
    """Return the limits and the free space of a store's disk, in bytes.

    Args:
        store: The directory of the store. It need not exist.
        max_disk: A result of `parse_amount`; None: capd's default.
        keep_free: A result of `parse_amount`.
        run_max: The bytes that a run may take; None: no limit.
    """
    place = _existing(store)
    found = os.statvfs(place)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return {
        "store": os.path.abspath(store),
        "free_bytes": free,
        "max_disk": default_max_disk(place) if max_disk is None else amount_nbytes(max_disk, total),
        "keep_free": amount_nbytes(keep_free, total),
        "run_max": run_max,
    }


def write_speed(store: str) -> Optional[float]:
    """Return the bytes per second of a trial, or None if the disk refuses it.

    The trial writes 64 MiB to a nameless file on the store's disk and syncs it.
    """
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=_existing(store)) as file:
            began = time.monotonic()
            for _ in range(_TRIAL_NBYTES // len(block)):
                file.write(block)
            file.flush()
            os.fdatasync(file.fileno())
            return _TRIAL_NBYTES / (time.monotonic() - began)
    except OSError:
        return None


def _existing(store: str) -> str:
    place = os.path.abspath(store)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    return place
