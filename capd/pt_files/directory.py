"""A directory of tensor files as tensor_saver left it: one subdirectory per quant type, `*.pt` in each.

The counter in a file's name is above all that its subdirectory holds, whoever wrote them.
"""

from __future__ import annotations

import os
from pathlib import Path

from capd.pt_files.names import name_parts
from capd.store.documents.names import component

__all__ = ["TensorDirectory"]


class TensorDirectory:
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
