"""The recorder's part of one run: its windows, the accounts of its ranks, its keeps, and what is on its way out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from capd.metrics import SHOWN_KEEPS, KeepStats, WindowStats
from capd.server.pipeline.jobs import Loss
from capd.server.recorder.let_go import LetGoLedger
from capd.server.recorder.run_keeps import RunKeeps
from capd.server.recorder.window import AttemptWindow, HeldIteration
from capd.store.format.ranges import RangeSet
from capd_client.protocol.counter_page import DropReason

__all__ = ["HeldAccount", "HeldHistory", "HeldRun", "UnkeptRecord"]


class HeldAccount(Protocol):
    """The account of one rank. The recorder calls it with its lock held; it must neither block nor raise."""

    def kept(self, record: int) -> None:
        """Note that a held record is committed."""

    def let_go(self, reason: DropReason, records: RangeSet, losses: Iterable[Loss]) -> None:
        """Note that held records will never be committed."""


class HeldHistory(NamedTuple):
    """What the recorder knows of a client: records that it holds, and those that it let go, by reason.

    Attributes:
        committed: The committed records, if some may be on their way from the spool to the store; None: the store
            knows them.
    """

    held: RangeSet
    let_go: Mapping[DropReason, RangeSet]
    committed: RangeSet | None


class UnkeptRecord(NamedTuple):
    """A record of the spool that was refused on its way to the store."""

    held: HeldIteration
    client: bytes
    sequence: int
    reason: DropReason
    loss: Loss


@dataclass(slots=True)
class HeldRun:
    """One run. The recorder's lock guards it.

    Attributes:
        committed: What is committed of clients of which an earlier daemon left records in the spool.
        going: Iterations that are let go, until that is in the ledger.
        unkept: Records that were refused, until that is in the ledger.
        expired: The records that this daemon let go.
        has_overflowed: An iteration was larger than the spool, and that was logged.
        has_failed: The ledger could not be written, and that was logged.
        has_stumbled: The last turn failed, and that was logged.
    """

    run_id: str
    ledger: LetGoLedger
    keeps: RunKeeps
    windows: dict[int, AttemptWindow] = field(default_factory=dict)
    accounts: dict[bytes, HeldAccount] = field(default_factory=dict)
    committed: dict[bytes, RangeSet] = field(default_factory=dict)
    going: list[HeldIteration] = field(default_factory=list)
    unkept: deque[UnkeptRecord] = field(default_factory=deque)
    expired: int = 0
    has_overflowed: bool = False
    has_failed: bool = False
    has_stumbled: bool = False

    def window(self, attempt: int) -> AttemptWindow:
        """Return the window of an attempt, which need not be known."""
        return self.windows.setdefault(attempt, AttemptWindow())

    def let_go(self, held: HeldIteration) -> None:
        """Decide that an iteration is let go."""
        self.windows[held.attempt].claim(held)
        self.going.append(held)

    def is_exhausted(self, held: HeldIteration) -> bool:
        """Return whether its files were read to their ends, and the outcome of all that was found is known."""
        return (
            not held.pending
            and not held.writing
            and all(segment.taken == segment.nbytes for segment in held.segments)
            and not any(one.held is held for one in self.unkept)
        )

    def held(self) -> Iterator[HeldIteration]:
        """Yield the iterations of which something is open."""
        for window in self.windows.values():
            yield from window.iterations.values()
        yield from self.going

    @property
    def is_leaving(self) -> bool:
        """Whether records or keeps are on their way out."""
        return (
            bool(self.going or self.unkept)
            or not self.keeps.is_written
            or any(one.leaves for one in self.held())
        )

    def history(self, client: bytes) -> HeldHistory:
        """Return what is known of a client."""
        held = RangeSet()
        for one in self.held():
            for first, last in one.open.get(client, RangeSet()).ranges():
                held.add_range(first, last)
        committed = self.committed.get(client)
        return HeldHistory(
            held, self.ledger.of(client), None if committed is None else RangeSet(committed.ranges())
        )

    def note_kept(self, held: HeldIteration, client: bytes, sequence: int) -> None:
        """Note that a held record is committed."""
        held.settle(client, sequence)
        if client in self.committed:
            self.committed[client].add(sequence)
        if (account := self.accounts.get(client)) is not None:
            account.kept(sequence)

    def note_gone(
        self, reason: DropReason, gone: Mapping[bytes, RangeSet], losses: Mapping[bytes, list[Loss]]
    ) -> None:
        """Note that records are not committed. The ledger has them."""
        for client, ranges in gone.items():
            if reason is DropReason.EXPIRED:
                self.expired += len(ranges)
            if (account := self.accounts.get(client)) is not None:
                account.let_go(reason, ranges, losses[client])

    def forget_attempts(self, now: float) -> None:
        """Forget attempts that have ended. Only those of the newest one may still be asked for."""
        newest = max(self.windows, default=0)
        for attempt, window in list(self.windows.items()):
            if attempt < newest and not window.iterations and window.is_over(now):
                del self.windows[attempt]

    def stats(self) -> WindowStats:
        """Return what is held."""
        held = list(self.held())
        numbers = [one.iteration for one in held]
        in_memory = sum(segment.nbytes for one in held for segment in one.segments if segment.in_memory)
        nbytes = sum(one.nbytes for one in held)
        return WindowStats(
            iterations=len(held),
            first=min(numbers, default=None),
            last=max(numbers, default=None),
            held_records=sum(len(ranges) for one in held for ranges in one.open.values()),
            held_bytes=nbytes,
            memory_bytes=in_memory,
            disk_bytes=nbytes - in_memory,
            expired=self.expired,
            keeps_total=len(self.keeps.all),
            keeps=[
                KeepStats.model_validate(msgspec.structs.asdict(keep))
                for keep in self.keeps.all[-SHOWN_KEEPS:]
            ],
        )
