"""The dumps below a directory: one dump.json for each step and rank. Symbolic links are not followed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from capd.exchange.msprobe.json_stream import header_of
from capd.pt_files.load import opened
from capd.pt_files.pickle_scan import BadTensorFile

__all__ = ["TENSORS", "Dump", "find_dumps"]

TENSORS = "dump_tensor_data"
"""The name of the directory of a dump that has its tensors."""

_STEP = re.compile(r"step(\d{1,18})")
_RANK = re.compile(r"rank(\d{1,9})")
_PROCESS = re.compile(r"proc(\d{1,18})")
_NUMBERED = re.compile(r"(?:step|rank|proc)[-+]?\d+")
_BESIDE = (TENSORS, "construct.json", "stack.json")
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Dump:
    """One rank in one step.

    Attributes:
        process: The process id if the rank is unknown.
        time_ns: When dump.json was written.
        problem: Why the names of its directories cannot be read, "" if they can.
    """

    directory: Path
    iteration: int
    rank: int
    process: int | None
    time_ns: int
    problem: str = ""


def find_dumps(root: Path) -> list[Dump]:
    """Return the dumps below `root`, or in it, by step and rank.

    A process whose rank is unknown gets a number: those of the first process id is 0.
    """
    found = [place for place in _directories(root.resolve()) if _is_dump(place / "dump.json")]
    processes = sorted({pid for place in found if (pid := _number(_PROCESS, place.name)) is not None})
    dumps = [_dump(place, processes) for place in found]
    return sorted(dumps, key=lambda dump: (dump.iteration, dump.rank, dump.directory))


def _directories(root: Path) -> Iterator[Path]:
    for place, below, files in os.walk(root):
        here = Path(place)
        if len(here.relative_to(root).parts) >= _DEPTH:
            below.clear()
        below[:] = sorted(name for name in below if name != TENSORS)
        if "dump.json" in (*files, *below):
            yield here


def _is_dump(path: Path) -> bool:
    try:
        with opened(path) as file:
            if header_of(file) is not None:
                return True
    except (BadTensorFile, OSError):
        pass
    # A damaged one is named and skipped. Only what is beside it tells that it is one.
    return any(os.path.lexists(path.with_name(name)) for name in _BESIDE)


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    found = pattern.fullmatch(name)
    return int(found[1]) if found else None


def _dump(place: Path, processes: list[int]) -> Dump:
    process = _number(_PROCESS, place.name)
    rank = _number(_RANK, place.name) if process is None else processes.index(process)
    step = _number(_STEP, place.parent.name)
    if step is None:
        step = _number(_STEP, place.name)
    unknown = [
        name
        for name, number in ((place.parent.name, step), (place.name, rank if process is None else process))
        if number is None and _NUMBERED.fullmatch(name)
    ]
    problem = f"the number of its directory {unknown[0][:80]!r} is none that a job has" if unknown else ""
    time_ns = (place / "dump.json").lstat().st_mtime_ns
    return Dump(place, step or 0, rank or 0, process, time_ns, problem)
