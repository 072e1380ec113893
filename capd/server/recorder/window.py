"""The window of one attempt: its held iterations, and which of them may go. Pure, apart from the segments it names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from capd.server.pipeline.jobs import Loss
from capd.server.recorder.kept_ranges import KeptRange, KeptRanges
from capd.server.recorder.segment import HeldFile
from capd.store.format.ranges import RangeSet
from capd_client.protocol.messages import Define

__all__ = ["SETTLE_S", "AttemptWindow", "HeldIteration", "oldest"]

SETTLE_S = 2.0
"""So long after its last record, an iteration waits for the rules and for other nodes."""


@dataclass(slots=True)
class HeldIteration:
    """One iteration in the spool.

    Attributes:
        segments: Its files.
        open: The records whose outcome is open, by client.
        unjudged: Those that the rules could not see yet.
        losses: What its records are: by client and definition, the count and the bytes.
        last_at: When its last record came (monotonic).
        writing: The records that are being copied.
        leaves: Its records leave for the store: tensors, or their statistics if it is not kept.
        is_damaged: The open records cannot be read.
        pending: The records in the pipeline.
    """

    attempt: int
    iteration: int
    segments: list[HeldFile] = field(default_factory=list)
    open: dict[bytes, RangeSet] = field(default_factory=dict)
    unjudged: dict[bytes, RangeSet] = field(default_factory=dict)
    losses: dict[tuple[bytes, int], tuple[Define, int, int]] = field(default_factory=dict)
    last_at: float = 0.0
    writing: int = 0
    leaves: bool = False
    is_damaged: bool = False
    pending: int = 0

    def add(self, client: bytes, sequence: int, define: Define, nbytes: int, now: float) -> None:
        """Note a record that is in a segment."""
        self.open.setdefault(client, RangeSet()).add(sequence)
        _, count, known = self.losses.get((client, id(define)), (define, 0, 0))
        # The definition stays alive here, so no other gets its identity.
        self.losses[client, id(define)] = (define, count + 1, known + nbytes)
        self.last_at = now

    def losses_of(self, client: bytes) -> list[Loss]:
        """Return what the open records of a client are. If others of it are committed, the keys are a guess."""
        left, found = len(self.open[client]), []
        for (one, _), (define, count, nbytes) in self.losses.items():
            if one == client and (lost := min(count, left)):
                found.append((define, self.iteration, lost, nbytes * lost // count))
                left -= lost
        return found

    def leave_unjudged(self, client: bytes, sequence: int) -> None:
        """Note that the rules could not see a record."""
        self.unjudged.setdefault(client, RangeSet()).add(sequence)

    def settle(self, client: bytes, sequence: int) -> None:
        """Note that the outcome of a record is known."""
        ranges = self.open[client]
        ranges.remove(sequence)
        if not ranges:
            del self.open[client]

    @property
    def may_go(self) -> bool:
        """Whether it is neither kept nor being filled."""
        return not self.leaves and not self.writing

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is open."""
        return not self.open and not self.writing and not self.pending

    @property
    def nbytes(self) -> int:
        """The bytes of its files."""
        return sum(segment.nbytes for segment in self.segments)


@dataclass(slots=True)
class AttemptWindow:
    """The window of one attempt of a run.

    Attributes:
        begun: The smallest current iteration of the ranks that are here; None without one.
        alone_since: Since when no rank has been here (monotonic); None while one is, or may come back.
    """

    iterations: dict[int, HeldIteration] = field(default_factory=dict)
    kept: KeptRanges = field(default_factory=KeptRanges)
    begun: int | None = None
    alone_since: float | None = None

    @property
    def has_backlog(self) -> bool:
        """Whether records are on their way from the spool to the store. Later ones must stay in line."""
        return any(held.leaves for held in self.iterations.values())

    @property
    def newest(self) -> int | None:
        """The newest held iteration."""
        return max(self.iterations, default=None)

    def may_have(self, first: int, last: int) -> bool:
        """Return whether iterations of a range are held, or may still come."""
        if any(first <= number <= last for number in self.iterations):
            return True
        if self.alone_since is not None or self.begun is None:
            return self.alone_since is None
        # The ranks may be ahead of their records.
        return last >= (self.begun if self.newest is None else min(self.begun, self.newest + 1))

    def keep(self, new: KeptRange) -> bool:
        """Keep a range, and have its held iterations leave. Return whether it covers one that was not kept."""
        if not self.kept.add(new):
            return False
        for number, held in self.iterations.items():
            held.leaves |= new.first <= number <= new.last
        return True

    def claim(self, held: HeldIteration) -> None:
        """Take an iteration out that is let go or done. A record of it that comes late begins another one."""
        if self.iterations.get(held.iteration) is held:
            del self.iterations[held.iteration]

    def past(self, now: float, iterations: int) -> list[HeldIteration]:
        """Return the iterations that nobody asked for in time, the oldest first.

        Args:
            now: The time (monotonic).
            iterations: The number of iterations that are held.
        """
        is_over = self.is_over(now)
        found, numbers = [], sorted(self.iterations)
        for number in numbers:
            held = self.iterations[number]
            if not held.may_go:
                continue
            passed = self.begun is not None and self.begun >= number + iterations
            # The ranks are ahead of their records: those of the last iteration may still be on their way.
            last = self.iterations[numbers[bisect_left(numbers, number + iterations) - 1]]
            if is_over or (passed and now - last.last_at >= SETTLE_S):
                found.append(held)
        return found

    def is_over(self, now: float) -> bool:
        """Whether no rank is here, nor was lately, nor may come back."""
        return self.alone_since is not None and now - self.alone_since >= SETTLE_S

    def look(self, begun: int | None, now: float, *, is_open: bool) -> None:
        """Note the progress of the ranks. is_open: a rank is here, or may come back."""
        self.begun = begun
        if is_open:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = now


def oldest(windows: Mapping[int, AttemptWindow]) -> HeldIteration | None:
    """Return the iteration that leaves first for lack of room; None if there is none."""
    can_go = [held for window in windows.values() for held in window.iterations.values() if held.may_go]
    return min(can_go, key=lambda held: (held.attempt, held.iteration), default=None)
