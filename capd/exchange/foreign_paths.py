"""The files below a directory of another tool, found without following symbolic links."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from capd.pt_files.files import TensorFile

__all__ = ["files_below"]


def files_below(root: Path, is_wanted: Callable[[str], bool]) -> list[TensorFile]:
    """Return the files below `root` whose names are wanted, by path, including symbolic links, which are not followed.

    Raises:
        OSError: `root` itself cannot be read.
    """
    root = root.resolve()
    # os.walk silently skips a directory that cannot be read.
    os.listdir(root)
    found = []
    for directory, _, names in os.walk(root):
        for name in filter(is_wanted, names):
            path = Path(directory, name)
            try:
                nbytes = path.lstat().st_size
            except OSError:
                # Opening the file reports the reason.
                nbytes = 0
            found.append(TensorFile(path.parent, name, nbytes))
    return sorted(found, key=lambda file: str(file.path))
