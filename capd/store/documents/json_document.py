"""Reads a zarr.json that may come from anybody: one JSON object from a regular file of bounded size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from capd.errors import NotAStore

__all__ = ["MAX_DEPTH", "MAX_LENGTH", "document_in", "is_length", "is_shallow", "read_document"]

# The largest length of an array's axis. Calculations with larger numbers could overflow.
MAX_LENGTH = 2**62
# Deeper JSON could exceed a reader's recursion limit.
MAX_DEPTH = 64
# The columns of 10,000 records take about 4 MiB.
_MAX_NBYTES = 64 << 20


def read_document(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a document; None if there is no file.

    Raises:
        NotAStore: The file is not regular, is too large, or is not a JSON object with unique names.
        OSError: The file cannot be read.
    """
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotAStore(f"{path} is not a regular file")
        with open(fd, "rb", closefd=False) as file:
            content = file.read(_MAX_NBYTES + 1)
    finally:
        os.close(fd)
    if len(content) > _MAX_NBYTES:
        raise NotAStore(f"{path} has more than {_MAX_NBYTES} bytes")
    return document_in(content, path)


def document_in(content: bytes, path: object) -> dict[str, Any]:
    """Return the JSON object in the bytes of a document at `path`.

    Raises:
        NotAStore: It is not a JSON object with unique names.
    """
    try:
        document = json.loads(content, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise NotAStore(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or not is_shallow(document):
        raise NotAStore(f"{path} is not a Zarr document")
    return document


def is_length(value: Any) -> bool:
    """Return whether a value of a document can be the length of an axis, or a count."""
    return type(value) is int and 0 <= value <= MAX_LENGTH


def is_shallow(document: Any) -> bool:
    """Return whether a document is shallow enough for functions that recurse into it."""
    level = [document]
    for _ in range(MAX_DEPTH):
        members = (m for one in level for m in (one.values() if isinstance(one, dict) else one))
        level = [member for member in members if isinstance(member, (dict, list))]
        if not level:
            return True
    return False


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found
