"""Partial results: what a task found, as bytes. Those of neighbouring tasks merge, each once, into one of both."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from capd.analyze.packed.codec import Damaged, pack, unpack
from capd.distributed.tasks.question import Question
from capd.errors import CapdError
from capd.report.gather import GatheredRecords

__all__ = [
    "FORMAT",
    "TaskSpan",
    "finished",
    "found_in_partial",
    "head_of",
    "merged",
    "pack_partial",
    "question_of",
]

FORMAT = 1
"""The version of the form of partial results."""


class _Partial(msgspec.Struct, array_like=True):
    format: int
    plan: str
    first: int
    last: int
    checksum: int
    question: Question
    content: bytes


class TaskSpan(NamedTuple):
    """What a partial result says of itself: its plan, its first task, and the task after its last one."""

    plan: str
    first: int
    last: int


def pack_partial(place: TaskSpan, question: Question, found: GatheredRecords) -> bytes:
    """Return the partial result of some neighbouring tasks."""
    content = pack(found, GatheredRecords)
    one = _Partial(FORMAT, *place, 0, question, content)
    one.checksum = _checksum(one)
    return msgspec.msgpack.encode(one)


def _checksum(one: _Partial) -> int:
    head = msgspec.msgpack.encode([one.plan, one.first, one.last, one.question])
    return zlib.crc32(one.content, zlib.crc32(head))


def question_of(partial: bytes) -> Question:
    """Return the question that a partial result answers. Raises Damaged if it is none."""
    return _opened(partial).question


def head_of(partial: bytes) -> TaskSpan:
    """Return what a partial result says of itself. Raises Damaged if it is none."""
    one = _opened(partial)
    return TaskSpan(one.plan, one.first, one.last)


def found_in_partial(partial: bytes) -> GatheredRecords:
    """Return the records of a partial result. Raises Damaged if it is none."""
    return unpack(_opened(partial).content, GatheredRecords)


def _opened(partial: bytes) -> _Partial:
    try:
        one = msgspec.msgpack.decode(partial, type=_Partial)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise Damaged(f"this is no partial result: {error}") from error
    if one.format != FORMAT:
        raise Damaged(f"a partial result has format {one.format}, and this capd reads {FORMAT}")
    if _checksum(one) != one.checksum or not 0 <= one.first < one.last:
        raise Damaged("a partial result fails its checksum")
    return one


def merged(partials: Iterable[bytes]) -> list[bytes]:
    """Merge the partial results of neighbouring tasks, in any order. What occurs twice counts once.

    Returns:
        One partial result for each run of neighbours, in order.

    Raises:
        CapdError: They are of several plans, or two of them share some tasks but not all.
    """
    opened = {(one.first, one.last): one for one in map(_opened, partials)}
    if len({one.plan for one in opened.values()}) > 1:
        raise CapdError("partial results of several plans do not merge; give those of one `capd plan-tasks`")
    kept = _once([opened[place] for place in sorted(opened, key=lambda place: (place[0], -place[1]))])
    runs: list[list[_Partial]] = []
    for one in kept:
        if runs and runs[-1][-1].last == one.first:
            runs[-1].append(one)
        else:
            runs.append([one])
    return [_joined(run) for run in runs]


def _once(ordered: Sequence[_Partial]) -> list[_Partial]:
    """Leave out what lies within another."""
    kept: list[_Partial] = []
    for one in ordered:
        if kept and one.last <= kept[-1].last:
            continue
        kept.append(one)
    for before, after in pairwise(kept):
        if after.first < before.last:
            raise CapdError(
                f"partial results of tasks {before.first}-{before.last - 1} and {after.first}-{after.last - 1} "
                "overlap, so that records would count twice"
            )
    return kept


def _joined(run: Sequence[_Partial]) -> bytes:
    if len(run) == 1:
        return msgspec.msgpack.encode(run[0])
    found = unpack(run[0].content, GatheredRecords)
    for one in run[1:]:
        found.extend(unpack(one.content, GatheredRecords))
    return pack_partial(TaskSpan(run[0].plan, run[0].first, run[-1].last), run[0].question, found)


def finished(partials: Iterable[bytes], tasks: int) -> GatheredRecords:
    """Return the records of all tasks of a plan. Raises CapdError if some are missing; the message names them."""
    runs = merged(partials)
    heads = [head_of(one) for one in runs]
    if len(runs) == 1 and heads[0][1:] == (0, tasks):
        return found_in_partial(runs[0])
    ends = [0, *(place for one in heads for place in (one.first, one.last)), tasks]
    missing = [f"{a}-{b - 1}" for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]
    raise CapdError(f"the results of tasks {', '.join(missing)} of {tasks} are missing")
