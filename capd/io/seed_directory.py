"""A directory of tensor files as tensor_saver left it: one subdirectory per quant type, `*.pt` in each.

One export at a time writes to a directory (it is locked meanwhile). Each file is written under a temporary name and
linked to its own, so that whatever has a name is whole, and no file is ever replaced; its counter is above all that the
subdirectory holds, whoever wrote them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from capd.io.output_directory import output_directory
from capd.io.seed_names import name_parts
from capd.store.names import component

__all__ = ["SeedDirectory", "locked_directory", "write_new"]

_TEMPORARY = ".capd-export-"


def locked_directory(path: Path) -> contextlib.AbstractContextManager[None]:
    """The directory that an export writes to: `output_directory`."""
    when_full = (
        ". Make room and export again into an empty directory, or choose fewer records (--layer, --tensor, …)"
    )
    return output_directory(path, _TEMPORARY, when_full)


def write_new(path: Path, write: Callable[[BinaryIO], None]) -> int:
    """Write a file (0600) that does not exist yet; returns its size in bytes. Raises FileExistsError, OSError."""
    fd, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            write(file)
            nbytes = file.tell()
        os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return nbytes


class SeedDirectory:
    """Hands out file names below a locked directory. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._counters: dict[Path, int] = {}

    def place(self, quant_type: str) -> tuple[Path, int]:
        """The subdirectory of a quant type, made if need be, and the next counter in it."""
        directory = self._root / component(quant_type)
        if directory not in self._counters:
            directory.mkdir(mode=0o700, exist_ok=True)
            known = (name_parts(name) for name in os.listdir(directory))
            self._counters[directory] = max((parts.counter for parts in known if parts), default=0)
        self._counters[directory] += 1
        return directory, self._counters[directory]
