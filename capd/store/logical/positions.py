"""Where the parts of an axis lie in the whole axis: the segments of each part, in the order of its elements.

All functions take the lengths of the parts along the axis, in the order of the ranks. A segment says that the next
`length` elements of a part belong at `start` and after it in the whole. A segment that is a `copy` is written by
another part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.errors import ContradictoryParts

__all__ = [
    "AxisSegment",
    "QkvHeads",
    "Segments",
    "blocks",
    "listed",
    "packed_zigzag",
    "qkv",
    "through",
    "zigzag",
]


class AxisSegment(NamedTuple):
    """Consecutive elements of a part that are consecutive in the whole, too."""

    start: int
    length: int
    copy: bool = False


Segments = Sequence[AxisSegment]


class QkvHeads:
    """The heads of a fused query, key and value projection.

    Megatron's fused projection has, for each group, its query heads, its key and its value (`attention.py`,
    `get_query_key_value_tensors`). A whole tensor in that order is cut by `fused_rows`. If there are fewer groups than
    tensor parallel ranks, a rank's rows need not be whole heads; only the whole is cut.
    """

    def __init__(self, heads: int, groups: int, size: int) -> None:
        """Describe the projection.

        Args:
            heads: The query heads of the whole attention.
            groups: The groups of the whole attention; each has one key and one value.
            size: The size of one head.

        Raises:
            ContradictoryParts: The heads cannot be divided into the groups.
        """
        if min(heads, groups, size) < 1 or heads % groups:
            raise ContradictoryParts(f"{heads} heads of size {size} cannot be divided into {groups} groups")
        self.heads, self.groups, self.size = heads, groups, size

    @property
    def rows(self) -> int:
        """The rows of the whole projection."""
        return (self.heads + 2 * self.groups) * self.size

    def fused_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of query, key and value in a whole tensor of Megatron's order, each in order of the heads."""
        per_group = self.heads // self.groups
        at = np.arange(self.rows, dtype=np.int64).reshape(self.groups, per_group + 2, self.size)
        return at[:, :per_group].reshape(-1), at[:, per_group].reshape(-1), at[:, per_group + 1].reshape(-1)


def through(outer: Segments, inner: Segments) -> Segments:
    """Return the segments in the outer axis of segments in a part of it. A copy of either is a copy."""
    if len(outer) == 1:
        return [AxisSegment(outer[0].start + s, length, copy or outer[0].copy) for s, length, copy in inner]
    begins = [0, *accumulate(one.length for one in outer)]
    found = []
    for start, length, copy in inner:
        at, end = start, start + length
        while at < end:
            number = bisect_right(begins, at) - 1
            cut = min(end, begins[number + 1])
            into = outer[number]
            found.append(AxisSegment(into.start + at - begins[number], cut - at, copy or into.copy))
            at = cut
    return found


def blocks(lengths: Sequence[int], count: int = 1) -> list[Segments]:
    """Return the segments of parts that each hold `count` blocks. All first blocks are before all second ones.

    Raises:
        ContradictoryParts: A part cannot be cut into that many equal blocks.
    """
    if any(length % count for length in lengths):
        raise ContradictoryParts(
            f"parts of lengths {list(lengths)[:8]} cannot be cut into {count} blocks each"
        )
    own = [length // count for length in lengths]
    starts, every = [0, *accumulate(own)], sum(own)
    return [
        [AxisSegment(block * every + start, length) for block in range(count)]
        for start, length in zip(starts, own, strict=False)
    ]


def zigzag(lengths: Sequence[int]) -> list[Segments]:
    """Return the segments of parts that hold chunk r and chunk 2 · parts - 1 - r of the axis.

    Source: Megatron-LM, `get_batch_on_this_cp_rank`.

    Raises:
        ContradictoryParts: The parts differ in length, or a part cannot be halved.
    """
    if len(set(lengths)) != 1 or lengths[0] % 2:
        raise ContradictoryParts(f"zigzag needs parts of one even length, and these have {list(lengths)[:8]}")
    return packed_zigzag(lengths, [0, sum(lengths)])


def packed_zigzag(lengths: Sequence[int], ends: Sequence[int]) -> list[Segments]:
    """Return the segments of parts of packed documents, each of which is dealt out in zigzag for itself.

    Args:
        lengths: The lengths of the parts.
        ends: `cu_seqlens` of the whole axis: 0, then the end of each document.

    Raises:
        ContradictoryParts: The parts differ in length, the ends do not grow from 0 to the length of the axis, or a
            document cannot be cut into 2 · parts equal chunks.
    """
    parts = len(lengths)
    if len(set(lengths)) != 1:
        raise ContradictoryParts(f"zigzag needs parts of one length, and these have {list(lengths)[:8]}")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != sum(lengths) or any(b < a for a, b in pairwise(ends)):
        raise ContradictoryParts(
            f"cu_seqlens {list(ends)[:8]} do not grow from 0 to the {sum(lengths)} positions of the axis"
        )
    found: list[list[AxisSegment]] = [[] for _ in range(parts)]
    for begin, end in pairwise(ends):
        if (end - begin) % (2 * parts):
            raise ContradictoryParts(
                f"the document at {begin} to {end} cannot be cut into {2 * parts} equal chunks"
            )
        chunk = (end - begin) // (2 * parts)
        for part in range(parts):
            both = (part, 2 * parts - 1 - part)
            found[part] += [AxisSegment(begin + number * chunk, chunk) for number in both]
    return list(found)


def listed(lengths: Sequence[int], indices: Sequence[Sequence[int]]) -> list[Segments]:
    """Return the segments of parts that say them themselves.

    Raises:
        ContradictoryParts: A part has another length than its index, or the indices are not all positions once.
    """
    for part, (length, index) in enumerate(zip(lengths, indices, strict=True)):
        if length != len(index):
            raise ContradictoryParts(f"part {part} has length {length}, and its index {len(index)} positions")
    found = [np.array(index, np.int64) for index in indices]
    everything = np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)
    if not np.array_equal(everything, np.arange(len(everything))):
        raise ContradictoryParts(f"the indices do not name each of {len(everything)} positions once")
    return [list(_runs(index)) for index in found]


def _runs(index: NDArray[np.int64]) -> Iterable[AxisSegment]:
    if not len(index):
        return
    cuts = np.flatnonzero(np.diff(index) != 1) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(index)]):
        yield AxisSegment(int(index[begin]), end - begin)


def qkv(lengths: Sequence[int], heads: QkvHeads) -> list[Segments]:
    """Return the segments of parts that hold query heads, then key groups, then value groups.

    The whole is all query heads, all keys, all values. With fewer groups than parts, `parts / groups` consecutive
    parts hold the same key and value. The first of them writes these.

    Raises:
        ContradictoryParts: The heads cannot be dealt out to so many parts, or a part has another length.
    """
    parts, size = len(lengths), heads.size
    if heads.heads % parts or (heads.groups % parts and parts % heads.groups):
        raise ContradictoryParts(
            f"{heads.heads} heads in {heads.groups} groups cannot be dealt out to {parts} ranks"
        )
    queries, groups = heads.heads // parts, max(1, heads.groups // parts)
    copies = max(1, parts // heads.groups)
    expected = (queries + 2 * groups) * size
    if any(length != expected for length in lengths):
        raise ContradictoryParts(
            f"parts of lengths {list(lengths)[:8]} should have {expected} rows of q, k and v"
        )
    found: list[Segments] = []
    for part in range(parts):
        own, shared = part % copies == 0, part // copies * groups * size
        key = (heads.heads * size) + shared
        found.append(
            [
                AxisSegment(part * queries * size, queries * size),
                AxisSegment(key, groups * size, not own),
                AxisSegment(key + heads.groups * size, groups * size, not own),
            ]
        )
    return found
