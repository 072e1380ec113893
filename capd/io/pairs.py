"""The pairs of a comparison: for each record of one side, the same tensor at the same moment of the other side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from capd.io.sides import Entry
from capd_client.protocol.key import Key

__all__ = ["MATCHED_MOMENT", "Matched", "Pair", "disjoint_fields", "matched"]

KEY = Key.__struct_fields__
MATCHED_MOMENT = ("iteration", "micro_batch", "call", "sample_idx", "batch_idx", "sequence_idx", "recompute")
"""The fields of a moment that two records of a pair share; attempt and time differ between runs."""


class Pair(NamedTuple):
    """Two records of one identity."""

    left: Entry
    right: Entry

    @property
    def nbytes(self) -> int:
        """The elements of both records in bytes."""
        return self.left.nbytes + self.right.nbytes

    @property
    def mismatch(self) -> str | None:
        """The reason why the elements of the pair cannot be compared, None if they can."""
        left, right = self
        if left.dtype != right.dtype:
            return f"dtype {left.dtype} against {right.dtype}"
        if left.shape != right.shape:
            return f"shape {list(left.shape)} against {list(right.shape)}"
        return None


class Matched(NamedTuple):
    """The result of matching.

    Attributes:
        pairs: The pairs in order of execution: by the left record's iteration, micro-batch and time.
        only_left: The left records without a counterpart.
        only_right: The right records without a counterpart.
    """

    pairs: list[Pair]
    only_left: list[Entry]
    only_right: list[Entry]


def matched(left: Iterable[Entry], right: Iterable[Entry], free: Collection[str]) -> Matched:
    """Match two sides.

    If several records of a side have one identity, records of equal dtypes and shapes are matched first, then the rest
    in capture order. The two records of a pair may differ in the `free` fields of keys and moments.
    """
    identity = attrgetter(
        *(f"key.{name}" for name in KEY if name not in free),
        *(f"moment.{name}" for name in MATCHED_MOMENT if name not in free),
    )
    waiting: dict[Any, list[Entry]] = {}
    for entry in right:
        waiting.setdefault(identity(entry), []).append(entry)
    found = Matched([], [], [])
    for entry in left:
        partners = waiting.get(identity(entry))
        if partners:
            alike = (
                at for at, one in enumerate(partners) if (one.dtype, one.shape) == (entry.dtype, entry.shape)
            )
            found.pairs.append(Pair(entry, partners.pop(next(alike, 0))))
        else:
            found.only_left.append(entry)
    found.pairs.sort(key=lambda pair: _executed(pair.left))
    return found._replace(only_right=list(chain.from_iterable(waiting.values())))


def disjoint_fields(left: Sequence[Entry], right: Sequence[Entry]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Return the fields for which the sides share no value, with the values. They explain why nothing was matched."""
    entries = left, right
    found = {}
    for name in (*KEY, *MATCHED_MOMENT):
        values = [{_value(entry, name) for entry in side} for side in entries]
        if all(values) and not values[0] & values[1]:
            found[name] = (sorted(values[0], key=str), sorted(values[1], key=str))
    return found


def _executed(entry: Entry) -> tuple[int, int, int]:
    moment = entry.moment
    return moment.iteration, moment.micro_batch, moment.time_ns


def _value(entry: Entry, name: str) -> Any:
    return getattr(entry.key if name in KEY else entry.moment, name)
