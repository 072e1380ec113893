"""The output of the command line: JSON, plain tables, sizes and versions. It imports neither torch nor zarr."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any, NoReturn

from capd._version import __version__
from capd.strict_json import json_number
from capd_client.process.text import human_count, human_nbytes, printable

__all__ = [
    "human_count", "human_nbytes", "human_number", "json_number", "leave_at_once", "note", "print_either", "print_json",
    "print_lines", "versions",
]  # fmt: skip

_PACKAGES = ("torch", "zarr", "numcodecs", "numpy", "msgspec", "pydantic", "typer")


def print_lines(lines: Iterable[str]) -> None:
    """Write lines of data to stdout and flush, so that a closed pipe is noticed here."""
    text = "".join(f"{line}\n" for line in lines)
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Write `value` as one JSON document to stdout, unrounded; floats go through `json_number` first."""
    print_lines([json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)])


def print_either(document: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Write the document as JSON, or the lines that say the same to people."""
    if as_json:
        print_json(document)
    else:
        print_lines(lines)


def note(message: str) -> None:
    """Write one message line to stderr. Names in it may come from a store of anybody."""
    print(f"capd: {printable(message)}", file=sys.stderr, flush=True)


def leave_at_once(code: int) -> NoReturn:
    """End the process without waiting for its threads. Everything is written out before."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def human_number(value: float | None) -> str:
    """Return a measured value with six significant digits, or a dash for None."""
    return "-" if value is None else f"{value:.6g}"


def versions() -> dict[str, str]:
    """Return the versions of capd, Python and the main packages, read without importing them."""
    from capd.store.format.frames import FORMAT_VERSION

    found = {"capd": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["format"] = str(FORMAT_VERSION)
    return found
