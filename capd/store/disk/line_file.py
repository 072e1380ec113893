"""A file of lines that one process appends to: read up to a limit, whatever lies at its path, and parsed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from capd.errors import StoreError
from capd.store.disk.files import opened

__all__ = ["Lines", "parsed_lines", "read_line_file", "whole_lines_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Lines(Generic[T]):
    """The content of a file of lines.

    Attributes:
        items: What the whole lines say, in order.
        nbytes: The bytes up to the end of the last whole line.
        damaged: The offsets of whole lines that say nothing.
        torn_nbytes: The bytes after the last whole line.
    """

    items: list[T]
    nbytes: int = 0
    damaged: tuple[int, ...] = ()
    torn_nbytes: int = 0


def parsed_lines(payload: bytes, parse: Callable[[bytes], T | None]) -> Lines[T]:
    """Return the lines in the bytes of a file, which may come from anybody. `parse` returns None for a damaged one."""
    items, damaged, at = [], [], 0
    while (end := payload.find(b"\n", at)) >= 0:
        item = parse(payload[at:end])
        if item is None:
            damaged.append(at)
        else:
            items.append(item)
        at = end + 1
    return Lines(items, at, tuple(damaged), len(payload) - at)


def read_line_file(path: Path, at_most: int, start: int = 0) -> bytes:
    """Return the bytes of a file from an offset on; b"" if there is no file.

    Args:
        path: The file.
        at_most: The bytes of the file that are looked at.
        start: The offset.

    Raises:
        StoreError: It is not a regular file.
        OSError: It cannot be read.
    """
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        with opened(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path} is not a regular file")
            room = min(found.st_size, at_most) - start
            payload = b""
            while len(payload) < room:
                piece = os.pread(fd, room - len(payload), start + len(payload))
                if not piece:
                    break
                payload += piece
            return payload
    except (FileNotFoundError, NotADirectoryError):
        return b""


def whole_lines_of(path: Path, at_most: int) -> bytes:
    """Return the bytes of a file up to the end of its last whole line. Raises as `read_line_file`."""
    payload = read_line_file(path, at_most)
    return payload[: payload.rfind(b"\n") + 1]
