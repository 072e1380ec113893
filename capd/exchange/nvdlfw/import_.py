"""Reads the statistics logs of nvdlfw-inspect into a run: each statistic becomes a scalar.

A line is the time, `INFO`, LAYER_TENSOR_STATISTIC, `iteration=000010` and `value=0.0000`. Values were printed with four
decimals: a gradient's amax of 1e-5 reads 0.0000. So each record has the metadata `rounded`. TensorBoard's events of the
same run are exact. Source: nvdlfw-inspect 0.2.2, `logging.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from capd.exchange.foreign_paths import files_below
from capd.pt_files.dictionary import foreign_capture
from capd.pt_files.files import TensorFile
from capd.pt_files.import_ import Outcome
from capd.pt_files.load import opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import ImportedRecord
from capd_client.protocol.key import MAX_NAME_CHARS
from capd_client.protocol.scalars import DTYPE, scalar_key

__all__ = ["NvdlfwLog", "nvdlfw_logs"]

_NAME = re.compile(r".+_globalrank-(\d{1,9})\.log\Z", re.DOTALL)
_LINE = re.compile(
    r"[\d\-:, ]{1,40} - [A-Z]{1,16} - (?P<name>\S.*?)\s+iteration=(?P<iteration>\d{1,18})\s+value=(?P<value>\S{1,64})\Z"
)
_MOST_LINE = 8192
_ROUNDED = {"rounded": "to four decimals, by nvdlfw-inspect's log"}


def nvdlfw_logs(root: Path) -> list[NvdlfwLog]:
    """Return the logs below `root`, by path. Raises OSError if it cannot be read."""
    return [NvdlfwLog(file) for file in files_below(root, lambda name: _NAME.match(name) is not None)]


@dataclass(frozen=True, slots=True)
class NvdlfwLog:
    """The log of one rank."""

    file: TensorFile

    def read(self) -> Iterator[ImportedRecord | Outcome]:
        """Yield each statistic of the log, and the reason for each line that has none.

        Raises:
            BadTensorFile: It is no such file.
            OSError: It cannot be read.
        """
        match = _NAME.match(self.file.file_name)
        if match is None:
            raise BadTensorFile("its name does not end in _globalrank-R.log")
        rank = int(match[1])
        with opened(self.file.path) as stream:
            number = 0
            while line := stream.readline(_MOST_LINE):
                number += 1
                text = line.decode(errors="replace").strip()
                if text:
                    yield self._record(rank, number, text)

    def _record(self, rank: int, number: int, text: str) -> ImportedRecord | Outcome:
        file = replace(self.file, entry=f"line {number}")
        match = _LINE.match(text)
        try:
            value = float(match["value"]) if match else math.nan
        except ValueError:
            match = None
        if match is None or len(match["name"]) > MAX_NAME_CHARS:
            return Outcome(file, problem=f"line {number} is no statistic: {text[:80]!r}")
        key = scalar_key(match["name"], rank)
        fields = {name: getattr(key, name) for name in type(key).__struct_fields__}
        capture = foreign_capture(fields, {"iteration": int(match["iteration"])}, {}, _ROUNDED)
        return ImportedRecord(file, capture, DTYPE, np.array(value, dtype="<f8"))
