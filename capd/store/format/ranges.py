"""A set of integers as sorted, disjoint, inclusive ranges. Committed sequences mostly form one range."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["RangeSet"]


class RangeSet:
    """A set of integers with add, membership and the list of (first, last) ranges."""

    __slots__ = ("_count", "_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in sorted(ranges):
            self._firsts.append(first)
            self._lasts.append(last)
        # Kept up to date, because the account of a rank asks at each tick, and some sets have a range for each step.
        self._count = sum(last - first + 1 for first, last in self.ranges())

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges():
            yield from range(first, last + 1)

    def add(self, number: int) -> None:
        """Add one integer. Adjacent ranges join."""
        firsts, lasts = self._firsts, self._lasts
        # This is nearly always the case.
        if lasts and number == lasts[-1] + 1:
            lasts[-1] = number
            self._count += 1
            return
        at = bisect_right(firsts, number)
        joins_left = at > 0 and number <= lasts[at - 1] + 1
        joins_right = at < len(firsts) and number == firsts[at] - 1
        if at > 0 and number <= lasts[at - 1]:
            return
        self._count += 1
        if joins_left and joins_right:
            lasts[at - 1] = lasts.pop(at)
            firsts.pop(at)
        elif joins_left:
            lasts[at - 1] = number
        elif joins_right:
            firsts[at] = number
        else:
            firsts.insert(at, number)
            lasts.insert(at, number)

    def add_range(self, first: int, last: int) -> None:
        """Add the integers from `first` to `last`. Ranges that it touches join."""
        firsts, lasts = self._firsts, self._lasts
        at = bisect_left(lasts, first - 1)
        end = bisect_right(firsts, last + 1)
        if at < end:
            first, last = min(first, firsts[at]), max(last, lasts[end - 1])
        known = sum(lasts[one] - firsts[one] + 1 for one in range(at, end))
        self._count += last - first + 1 - known
        firsts[at:end] = [first]
        lasts[at:end] = [last]

    def remove(self, number: int) -> None:
        """Remove one integer, if it is here."""
        firsts, lasts = self._firsts, self._lasts
        if lasts and number == firsts[0] < lasts[0]:
            firsts[0] += 1
            self._count -= 1
            return
        at = bisect_right(firsts, number) - 1
        if at < 0 or number > lasts[at]:
            return
        first, last = firsts[at], lasts[at]
        self._count -= 1
        rest = [(low, high) for low, high in ((first, number - 1), (number + 1, last)) if low <= high]
        firsts[at : at + 1] = [low for low, _ in rest]
        lasts[at : at + 1] = [high for _, high in rest]

    def without(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the ranges that remain without some integers, in ascending order."""
        cuts = sorted(set(numbers))
        kept: list[tuple[int, int]] = []
        at = 0
        for first, last in self.ranges():
            while at < len(cuts) and cuts[at] < first:
                at += 1
            while at < len(cuts) and cuts[at] <= last:
                if first < cuts[at]:
                    kept.append((first, cuts[at] - 1))
                first = cuts[at] + 1
                at += 1
            if first <= last:
                kept.append((first, last))
        return kept

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges in ascending order."""
        return list(zip(self._firsts, self._lasts, strict=True))
