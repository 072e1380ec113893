"""The tools that capd writes files for. The module of a tool is imported when it is needed.

It has `export_files(request)`, which yields each ExportedFile when it is whole.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from capd.output_directory import ExportedFile

if TYPE_CHECKING:
    from capd.store.read.scalars import Scalar
    from capd.store.read.series import Series

__all__ = ["WRITERS", "ExportRequest", "export_for"]


WRITERS = {
    "msprobe": "capd.exchange.msprobe.export",
    "sglang": "capd.exchange.sglang.export",
    "tensorboard": "capd.exchange.tensorboard.export",
}
"""The module that writes, by the name of the tool that `capd export --to` takes."""


@dataclass(frozen=True)
class ExportRequest:
    """An export: the run's id, the series with their chosen records, the directory, and options of single tools.

    Attributes:
        repeat_weights: msprobe: write a weight for every call, not only for the call that captured it.
        scalars: Reads the scalars that were chosen, too.
        left_out: The numbers of records that are in no file, by reason, None for an unknown number. The writer adds.
        remarks: The numbers of written records of which something must be said, by that. The writer fills it.
    """

    run_id: str
    chosen: Sequence[Series]
    out: Path
    repeat_weights: bool = False
    scalars: Callable[[], Sequence[Scalar]] = tuple
    left_out: dict[str, int | None] = field(default_factory=dict)
    remarks: Counter[str] = field(default_factory=Counter)

    def leave_out(self, reason: str, records: int = 1) -> None:
        """Count records that are in no file."""
        self.left_out[reason] = (self.left_out.get(reason) or 0) + records


def export_for(name: str, request: ExportRequest) -> Iterator[ExportedFile]:
    """Write the files of the tool `name`, and yield each when it is whole. Raises as the tool's writer does."""
    written: Iterator[ExportedFile] = importlib.import_module(WRITERS[name]).export_files(request)
    return written
