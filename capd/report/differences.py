"""Compares matched pairs of records in order of execution, with a few reading threads, and keeps the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.ahead import AHEAD_NBYTES, ahead
from capd.analyze.difference import Difference, difference_of
from capd.analyze.groups import Value, order_of
from capd.errors import CapdError
from capd.io.pairs import MATCHED_MOMENT, Matched, Pair
from capd.io.sides import Side, Unread, unread
from capd_client.protocol.key import Key

__all__ = ["DIFFERENCE_COLUMNS", "Differences", "compare_each", "plain_difference", "plain_pair"]

DIFFERENCE_COLUMNS = (
    "pairs", "identical", "elements", "equal", "special", "max_abs", "max_relative", "absmax", "relative", "mae", "mse",
    "rmse", "normalised_l2", "sqnr_db", "psnr_db", "cosine",
)  # fmt: skip
_KEY = frozenset(Key.__struct_fields__)


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
    unread: list[Unread] = field(default_factory=list)
    different: int = 0
    first: dict[str, Any] | None = None

    def add(self, pair: Pair, difference: Difference) -> bool:
        """Add a pair. Return whether it is beyond the tolerance."""
        is_different = difference.exceeds(self.tolerance)
        self.different += is_different
        if self.keeps_each or (is_different and self.first is None):
            row = plain_pair(self, pair, difference)
            if self.keeps_each:
                self.each.append(row)
            if is_different and self.first is None:
                self.first = row
        self.whole.add(difference)
        place = tuple(getattr(pair.left.key if name in _KEY else pair.left.moment, name) for name in self.by)
        self.groups.setdefault(place, Difference()).add(difference)
        return is_different

    def by_group(self) -> dict[tuple[Value, ...], Difference]:
        """Return the groups in the order of their values."""
        return {values: self.groups[values] for values in sorted(self.groups, key=order_of)}


def compare_each(
    matched: Matched, found: Differences, *, threads: int, until_first: bool
) -> Iterator[Unread | int]:
    """Compare all pairs in order.

    About 128 MiB of records are in memory at once, or one pair if it is larger.

    Args:
        matched: The pairs.
        found: Receives the differences.
        threads: The number of reading threads.
        until_first: Whether to end at the first pair beyond the tolerance.

    Yields:
        The bytes of each pair, or the reason why it could not be read.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="capd-compare") as pool:

        def begin(pair: Pair) -> Future[Difference | Unread]:
            return pool.submit(_compared, pair, found.left, found.right)

        try:
            for pair, future in ahead(_comparable(matched.pairs, found), begin, _nbytes, AHEAD_NBYTES):
                difference = future.result()
                if isinstance(difference, Unread):
                    found.unread.append(difference)
                    yield difference
                    continue
                yield _nbytes(pair)
                if found.add(pair, difference) and until_first:
                    return
        finally:
            pool.shutdown(cancel_futures=True)


def _comparable(pairs: Sequence[Pair], found: Differences) -> Iterator[Pair]:
    for pair in pairs:
        mismatch = pair.mismatch
        if mismatch is None:
            yield pair
        else:
            found.mismatched.append((pair, mismatch))


def _nbytes(pair: Pair) -> int:
    return pair.left.nbytes + pair.right.nbytes


def _compared(pair: Pair, left: Side, right: Side) -> Difference | Unread:
    bits: dict[str, NDArray[np.generic]] = {}
    for name, side, entry in (("a", left, pair.left), ("b", right, pair.right)):
        try:
            bits[name] = side.read(entry)
        except (CapdError, OSError, RuntimeError, MemoryError) as error:
            return unread(f"{side.source}: {side.name(entry)}", error, damaged=side.damaged)
    return difference_of(bits["a"], bits["b"], pair.left.dtype)


def plain_difference(difference: Difference) -> dict[str, Any]:
    """Return a difference as plain values, with unrounded floats."""
    errors = difference.errors
    own = {
        "pairs": errors.records, "identical": difference.identical, "elements": errors.count,
        "equal": difference.equal, "special": difference.special, "max_relative": difference.max_relative,
    }  # fmt: skip
    return {name: own[name] if name in own else getattr(errors, name) for name in DIFFERENCE_COLUMNS}


def plain_pair(found: Differences, pair: Pair, difference: Difference) -> dict[str, Any]:
    """Describe one pair: its place, key and moment of the left record, and the difference of the right one."""
    left = pair.left
    return {
        "left": found.left.name(left),
        "right": found.right.name(pair.right),
        **{name: getattr(left.key, name) for name in Key.__struct_fields__},
        **{name: getattr(left.moment, name) for name in (*MATCHED_MOMENT, "time_ns")},
        "dtype": left.dtype,
        "shape": list(left.shape),
        "different": difference.exceeds(found.tolerance),
        **{name: value for name, value in plain_difference(difference).items() if name != "pairs"},
    }
