"""A directory of tensor files as tensor_saver lays it out: one subdirectory for each quant type, with `*.pt` files.

The counter in a new file's name is larger than all counters in the subdirectory, whoever wrote the files.
"""

from __future__ import annotations

import os
from pathlib import Path

from capd.pt_files.names import name_parts
from capd.store.documents.names import component

__all__ = ["TensorDirectory"]


class TensorDirectory:
    """A source of file names below a locked directory. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._counters: dict[Path, int] = {}

    def place(self, quant_type: str) -> tuple[Path, int]:
        """Return the subdirectory of a quant type and the next counter in it. Create it if it is missing."""
        directory = self._root / component(quant_type)
        if directory not in self._counters:
            directory.mkdir(mode=0o700, exist_ok=True)
            known = (name_parts(name) for name in os.listdir(directory))
            self._counters[directory] = max((parts.counter for parts in known if parts), default=0)
        self._counters[directory] += 1
        return directory, self._counters[directory]
