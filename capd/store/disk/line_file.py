"""A file of lines that one process appends to: read up to a limit, whatever lies at its path."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from capd.errors import StoreError
from capd.store.disk.files import opened

__all__ = ["read_line_file", "whole_lines_of"]


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
