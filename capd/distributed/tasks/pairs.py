"""The differences of some pairs of records as a task: both sides of each pair are read where it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from capd.analyze.difference import Difference
from capd.analyze.packed.codec import pack, unpack
from capd.distributed.tasks.planning import place_text
from capd.distributed.tasks.reading import reader_of
from capd.errors import ConfigError
from capd.io.items import Skipped
from capd.io.pairs import Pair
from capd.io.sides import Entry, Side
from capd.report.differences import difference_between

__all__ = ["pair_results", "pair_task", "pair_tasks", "run_pairs", "runs_of"]

# A task names each pair, and its result has a difference of some KiB for each.
_MOST_PAIRS = 1024


class _PairSide(NamedTuple):
    name: str
    reference: tuple[str, str, str, int]
    damaged: bool


class _PairTask(NamedTuple):
    plan: str
    pairs: list[tuple[_PairSide, _PairSide, str]]


class _PairResult(NamedTuple):
    difference: Difference | None
    skipped: Skipped | None


def pair_tasks(pairs: Sequence[Pair], nbytes: int) -> Iterator[Sequence[Pair]]:
    """Cut pairs, in order, into those of each task, which are so many bytes or one pair."""
    first = held = 0
    for at, pair in enumerate(pairs):
        if at > first and (held + pair.nbytes > nbytes or at - first >= _MOST_PAIRS):
            yield pairs[first:at]
            first, held = at, 0
        held += pair.nbytes
    if first < len(pairs):
        yield pairs[first:]


def runs_of(left: Side, right: Side, pairs: Sequence[Pair]) -> list[str]:
    """Return the runs of some pairs. Raises ConfigError for tensor files."""
    return list(
        dict.fromkeys(
            place_text(_reference(side, entry)[0])
            for pair in pairs
            for side, entry in ((left, pair.left), (right, pair.right))
        )
    )


def _reference(side: Side, entry: Entry) -> tuple[str, str, str, int]:
    if entry.reference is None:
        raise ConfigError(f"{side.source} has .pt files, which --scheduler threads compares alone")
    return entry.reference


def pair_task(plan: str, left: Side, right: Side, pairs: Sequence[Pair]) -> bytes:
    """Return the task that compares some pairs. Raises ConfigError for tensor files."""

    def each(side: Side, at: int, pair: Pair) -> _PairSide:
        entry = pair[at]
        run, node, path, number = _reference(side, entry)
        reference = (place_text(run), node, path, number)
        return _PairSide(f"{side.source}: {entry.name}", reference, side.damaged)

    task = [(each(left, 0, pair), each(right, 1, pair), pair.left.dtype) for pair in pairs]
    return pack(_PairTask(plan, task), _PairTask)


def run_pairs(task: bytes) -> bytes:
    """Run a task of `pair_task`."""
    plan, pairs = unpack(task, _PairTask)
    results = []
    for *sides, dtype in pairs:
        found = difference_between(
            [(side.name, reader_of(plan, side.reference), side.damaged) for side in sides], dtype
        )
        results.append(_PairResult(None, found) if isinstance(found, Skipped) else _PairResult(found, None))
    return pack(results, list[_PairResult])


def pair_results(found: bytes) -> list[Difference | Skipped]:
    """Return what `run_pairs` found, in the order of the pairs. Raises Damaged if it is nothing of that."""
    results: list[_PairResult] = unpack(found, list[_PairResult])
    return [one.difference or one.skipped or Difference() for one in results]
