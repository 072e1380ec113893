"""Reads the statistics logs of nvdlfw-inspect into a run: each statistic becomes a scalar.

A line is the time, `INFO`, LAYER_TENSOR_STATISTIC, `iteration=000010` and `value=0.0000`. Values were printed with four
decimals: a gradient's amax of 1e-5 reads 0.0000. So each record has the metadata `rounded`. TensorBoard's events of the
same run are exact. Source: nvdlfw-inspect 0.2.2, `logging.py`.

A line is known by its number and text, not by the size of its file: the log of a job that goes on grows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

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

_NAME = re.compile(r".+_globalrank-([0-9]+)\.log\Z", re.DOTALL)
_BEGIN = re.compile(r"[0-9\-:, ]{1,40} - [A-Z]{1,16} - ")
_ITERATION = re.compile(r"[0-9]{1,18}\Z")
_VALUE = re.compile(r"[0-9.eE+\-]{1,64}\Z|-?(?:nan|inf)\Z")
# Its other logs have the same names, and messages alone.
_MESSAGES = "nvdlfw_inspect_logs"
_MOST_LINE = 8192
_MOST_RANK_DIGITS = 9
# A log of another kind has millions of lines that are no statistic.
_MOST_NAMED = 16
_ROUNDED = {"rounded": "to four decimals, by nvdlfw-inspect's log"}


class LoggedStatistic(NamedTuple):
    """A line of a log."""

    name: str
    iteration: int
    value: float


def nvdlfw_logs(root: Path) -> list[NvdlfwLog]:
    """Return the logs below `root`, by path. Raises OSError if it cannot be read."""
    found = files_below(root, lambda name: _NAME.match(name) is not None)
    return [NvdlfwLog(file) for file in found if file.directory.name != _MESSAGES]


@dataclass(frozen=True, slots=True)
class NvdlfwLog:
    """The log of one rank."""

    file: TensorFile

    def read(self) -> Iterator[ImportedRecord | Outcome]:
        """Yield each statistic of the log, and the reason for each line that has none: the first 16, then their number.

        Raises:
            BadTensorFile: It is no such file.
            OSError: It cannot be read.
        """
        match = _NAME.match(self.file.file_name)
        if match is None:
            raise BadTensorFile("its name does not end in _globalrank-R.log")
        if len(match[1]) > _MOST_RANK_DIGITS:
            raise BadTensorFile("its name has a rank that no job has")
        rank, refused = int(match[1]), 0
        with opened(self.file.path) as stream:
            for number, line in enumerate(_lines(stream), 1):
                text = line.decode(errors="replace").strip()
                if not text:
                    continue
                problem = (
                    ""
                    if line.endswith(b"\n")
                    else "has no end, so its value may be cut; import it again later"
                )
                found = None if problem else _statistic(text)
                if found is not None:
                    yield self._record(rank, number, text, found)
                    continue
                refused += 1
                if refused <= _MOST_NAMED:
                    problem = problem or f"is no statistic: {text[:80]!r}"
                    yield Outcome(replace(self.file, entry=str(number)), problem=f"line {number} {problem}")
        if refused > _MOST_NAMED:
            yield Outcome(self.file, problem=f"{refused - _MOST_NAMED:,} more lines are no statistic")

    def _record(self, rank: int, number: int, text: str, found: LoggedStatistic) -> ImportedRecord:
        file = replace(self.file, nbytes=0, entry=f"{number}:{text}")
        key = scalar_key(found.name, rank)
        fields = {name: getattr(key, name) for name in type(key).__struct_fields__}
        capture = foreign_capture(fields, {"iteration": found.iteration}, {}, _ROUNDED)
        return ImportedRecord(file, capture, DTYPE, np.array(found.value, dtype="<f8"))


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines, of a longer one the first bytes and its end."""
    while line := stream.readline(_MOST_LINE):
        more = line
        while not more.endswith(b"\n") and (more := stream.readline(_MOST_LINE)):
            pass
        yield line if line is more or not more else line + b"\n"


def _statistic(text: str) -> LoggedStatistic | None:
    """Return the statistic of a line, None if it has none. It takes linear time for any text."""
    begin = _BEGIN.match(text)
    rest, _, value = text.rpartition("value=")
    name, _, iteration = rest.rpartition("iteration=")
    name, iteration = name[begin.end() if begin else 0 :].strip(), iteration.strip()
    if not (begin and name and _ITERATION.match(iteration) and _VALUE.match(value)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    # A number that float64 lacks is none of the log's.
    fits = len(name) <= MAX_NAME_CHARS and (math.isfinite(number) or not value[-1].isdigit())
    return LoggedStatistic(name, int(iteration), number) if fits else None
