"""The ranks in the names of Megatron's files: mp_rank_TT[_PPP][_EEE].pth.

The stage of the pipeline is in the name if there are several stages, and the rank of expert parallelism if there are
several. So one number after the first may be either, and only the job's sizes tell which. Source: Megatron-LM,
`megatron/training/checkpointing.py`, get_checkpoint_name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from capd.errors import ConfigError

__all__ = ["AxisRanks", "AxisSizes", "NameNumbers", "name_numbers", "ranks_and_sizes"]

_NAME = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?\.pth\Z")
_OPTIONS = ("--tp", "--pp", "--ep")
_AXES = ("tensor parallelism", "the pipeline", "expert parallelism")

NameNumbers = tuple[int, ...]


class AxisSizes(NamedTuple):
    """The sizes of tensor, pipeline and expert parallelism of a job; None for one that is not known."""

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None


class AxisRanks(NamedTuple):
    """A rank of tensor, pipeline and expert parallelism."""

    tp: int
    pp: int
    ep: int


def name_numbers(file_name: str) -> NameNumbers | None:
    """Return the numbers in a file's name, None if it is no name of such a file."""
    match = _NAME.match(file_name)
    return None if match is None else tuple(int(text) for text in match.groups() if text is not None)


def ranks_and_sizes(
    names: Sequence[NameNumbers], known: AxisSizes
) -> tuple[list[AxisRanks], tuple[int, int, int]]:
    """Return the ranks that the files of one job belong to, and the sizes of the job.

    A size that is not known is that of the files.

    Args:
        names: The numbers in each file's name.
        known: The sizes that the user gave.

    Raises:
        ConfigError: The names can be read in two ways, or contradict the sizes. The message says what to give.
    """
    counts = sorted({len(numbers) for numbers in names})
    if len(counts) > 1:
        raise ConfigError(
            f"the names of files have {counts[0]} and {counts[-1]} numbers, so they are of several jobs; "
            "import each job's directory by itself"
        )
    axes = _axes(counts[0], known, _shown(names[0]))
    ranks = [AxisRanks(*(n[axes.index(axis)] if axis in axes else 0 for axis in range(3))) for n in names]
    sizes = [_size(axis, {one[axis] for one in ranks}, known[axis]) for axis in range(3)]
    return ranks, (sizes[0], sizes[1], sizes[2])


def _axes(count: int, known: AxisSizes, shown: str) -> tuple[int, ...]:
    """Return the axis of each number in the names: 0 is tensor parallelism, 1 the pipeline, 2 expert parallelism."""
    several = {axis for axis in (1, 2) if (known[axis] or 1) > 1}
    single = {axis for axis in (1, 2) if known[axis] == 1}
    if 1 + len(several) > count or 3 - len(single) < count:
        given = " and ".join(
            f"{option} {size}" for option, size in zip(_OPTIONS[1:], known[1:], strict=True) if size
        )
        raise ConfigError(
            f"{shown} has {count} {'number' if count == 1 else 'numbers'}, which contradicts {given}: "
            "Megatron names the stage if there are several, and then the expert's rank if there are several"
        )
    if count == 2 and not several and not single:
        raise ConfigError(
            f"the second number of {shown} is the stage of a pipeline or the rank of an expert; give --pp N and "
            "--layers N if the job had a pipeline, or --ep N if it had expert parallelism"
        )
    axes = (0, 1, 2) if count == 3 else (0, *(sorted(several or {1, 2} - single) if count == 2 else ()))
    if 1 in axes and known.pp is None:
        raise ConfigError(f"{shown} is of a stage of a pipeline; give --pp N and --layers N")
    return axes


def _size(axis: int, ranks: set[int], known: int | None) -> int:
    if known is None:
        if ranks != set(range(len(ranks))):
            missing = next(rank for rank in range(len(ranks)) if rank not in ranks)
            raise ConfigError(f"no file is of rank {missing} of {_AXES[axis]}; give {_OPTIONS[axis]} N")
        return len(ranks)
    if max(ranks) >= known:
        raise ConfigError(
            f"a file is of rank {max(ranks)} of {_AXES[axis]}, which contradicts {_OPTIONS[axis]} {known}"
        )
    return known


def _shown(numbers: NameNumbers) -> str:
    first, *rest = numbers
    return "_".join(("mp_rank", f"{first:02}", *(f"{number:03}" for number in rest))) + ".pth"
