"""Compares matched pairs of records in order of execution, with a few reading threads, and keeps the results."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.analyze.difference import Difference, difference_of
from capd.analyze.groups import Value, order_of
from capd.io.items import UNREADABLE, Skipped, skipped
from capd.io.pairs import MATCHED_MOMENT, Matched, Pair
from capd.io.sides import Side
from capd_client.protocol.key import Key

__all__ = [
    "DIFFERENCE_COLUMNS", "Compared", "Differences", "compare_each", "compared_here", "difference_between",
    "plain_difference",
]  # fmt: skip

DIFFERENCE_COLUMNS = (
    "pairs", "identical", "elements", "equal", "special", "max_abs", "max_relative", "absmax", "relative", "mae", "mse",
    "rmse", "normalised_l2", "sqnr_db", "psnr_db", "cosine",
)  # fmt: skip
_KEY = frozenset(Key.__struct_fields__)

Compared = Callable[[Sequence[Pair]], Generator[Union[Difference, Skipped], None, None]]


@dataclass(slots=True)
class Differences:
    """The differences found so far.

    Attributes:
        by: The fields of the groups.
        each: A row for every pair, if requested.
        mismatched: The pairs of different dtypes or shapes, with the reason.
        different: The number of pairs beyond the tolerance.
    """

    left: Side
    right: Side
    by: tuple[str, ...]
    tolerance: float = 0.0
    keeps_each: bool = False
    whole: Difference = field(default_factory=Difference)
    groups: dict[tuple[Value, ...], Difference] = field(default_factory=dict)
    each: list[dict[str, Any]] = field(default_factory=list)
    mismatched: list[tuple[Pair, str]] = field(default_factory=list)
    unread: list[Skipped] = field(default_factory=list)
    different: int = 0
    first: dict[str, Any] | None = None

    def add(self, pair: Pair, difference: Difference) -> bool:
        """Add a pair. Return whether it is beyond the tolerance."""
        is_different = difference.exceeds(self.tolerance)
        self.different += is_different
        is_first = is_different and self.first is None
        if self.keeps_each or is_first:
            row = _plain_pair(self.tolerance, pair, difference)
            if self.keeps_each:
                self.each.append(row)
            if is_first:
                self.first = row
        self.whole.add(difference)
        place = tuple(getattr(pair.left.key if name in _KEY else pair.left.moment, name) for name in self.by)
        self.groups.setdefault(place, Difference()).add(difference)
        return is_different

    def by_group(self) -> dict[tuple[Value, ...], Difference]:
        """Return the groups in the order of their values."""
        return {values: self.groups[values] for values in sorted(self.groups, key=order_of)}


def compare_each(
    matched: Matched, found: Differences, compared: Compared, *, until_first: bool
) -> Iterator[Skipped | int]:
    """Compare all pairs in order.

    `found` receives the differences. `compared` yields the difference of each of some pairs, or the reason why there is
    none, in order. `until_first` ends at the first pair beyond the tolerance.

    Yields:
        The bytes of each pair, or the reason why it could not be read.
    """
    with closing(compared([pair for pair in matched.pairs if pair.mismatch is None])) as differences:
        for pair in matched.pairs:
            mismatch = pair.mismatch
            if mismatch is not None:
                found.mismatched.append((pair, mismatch))
                continue
            difference = next(differences)
            if isinstance(difference, Skipped):
                found.unread.append(difference)
                yield difference
                continue
            yield pair.nbytes
            if found.add(pair, difference) and until_first:
                return


def compared_here(left: Side, right: Side, threads: int) -> Compared:
    """Return what compares pairs in threads of this process. About 128 MiB or one pair are in memory at once."""

    def compared(pairs: Sequence[Pair]) -> Generator[Difference | Skipped, None, None]:
        with worker_threads(threads, "compare") as pool:

            def begin(pair: Pair) -> Future[Difference | Skipped]:
                sides = [
                    (f"{side.source}: {entry.name}", entry.read, side.damaged)
                    for side, entry in zip((left, right), pair, strict=True)
                ]
                return pool.submit(difference_between, sides, pair.left.dtype)

            for _, future in ahead(pairs, begin, lambda pair: pair.nbytes, AHEAD_NBYTES):
                yield future.result()

    return compared


def difference_between(
    sides: Sequence[tuple[str, Callable[[], NDArray[np.generic]], bool]], dtype: str
) -> Difference | Skipped:
    """Read two records and return their difference, or the reason why one cannot be read.

    Args:
        sides: For each record its name, the function that reads it, and whether it is known to be in a run.
        dtype: The torch dtype of both.
    """
    bits = []
    for name, read, damaged in sides:
        try:
            bits.append(read())
        except UNREADABLE as error:
            return skipped(name, error, damaged=damaged)
    return difference_of(bits[0], bits[1], dtype)


def plain_difference(difference: Difference) -> dict[str, Any]:
    """Return a difference as plain values, with unrounded floats."""
    errors = difference.errors
    own = {
        "pairs": errors.records, "identical": difference.identical, "elements": errors.count,
        "equal": difference.equal, "special": difference.special, "max_relative": difference.max_relative,
    }  # fmt: skip
    return {name: own[name] if name in own else getattr(errors, name) for name in DIFFERENCE_COLUMNS}


def _plain_pair(tolerance: float, pair: Pair, difference: Difference) -> dict[str, Any]:
    """Describe one pair: its place, key and moment of the left record, and the difference of the right one."""
    left = pair.left
    return {
        "left": left.name,
        "right": pair.right.name,
        **{name: getattr(left.key, name) for name in Key.__struct_fields__},
        **{name: getattr(left.moment, name) for name in (*MATCHED_MOMENT, "time_ns")},
        "dtype": left.dtype,
        "shape": list(left.shape),
        "different": difference.exceeds(tolerance),
        **{name: value for name, value in plain_difference(difference).items() if name != "pairs"},
    }
