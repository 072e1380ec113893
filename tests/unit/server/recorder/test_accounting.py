"""The accounts of ranks stay exact over any order of events: each capture has one outcome, or is in flight."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from capd.server.recorder.let_go import LetGoLedger
from capd_client.protocol.counter_page import DropReason
from tests.unit.server.recorder.desk import MIB, Desk

RANKS = 2
_append = LetGoLedger._append


class Accounting(RuleBasedStateMachine):
    """Two ranks, a recorder, and all that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.is_full = False

        def append(ledger: LetGoLedger, payload: bytes) -> None:
            if self.is_full:
                raise OSError(28, "No space left on device")
            _append(ledger, payload)

        self.patch.setattr("capd.store.keeps.held_files.SHARED_MEMORY", self.place / "shm")
        self.patch.setattr(LetGoLedger, "_append", append)

    @initialize(statistics=st.booleans(), memory=st.sampled_from([0, MIB // 4]))
    def begin(self, statistics: bool, memory: int) -> None:
        (self.place / "shm").mkdir()
        self.desk = Desk(self.place / "d", statistics=statistics, memory_nbytes=memory)
        self.at = [0] * RANKS
        self.look()

    def look(self) -> None:
        self.desk.look(min(self.at))

    @rule(steps=st.integers(1, 5), size=st.sampled_from([8, 64, 64, MIB // 8, MIB // 3, MIB + 1]))
    def train(self, steps: int, size: int) -> None:
        for _ in range(steps):
            for number in range(RANKS):
                self.desk.put(self.at[number], number)
                self.desk.put(self.at[number], number, nbytes=size)
                self.at[number] += 1
            self.look()

    @rule(number=st.integers(0, RANKS - 1))
    def lead(self, number: int) -> None:
        """One rank is ahead of the other."""
        self.at[number] += 1
        self.look()

    @rule(seconds=st.sampled_from([0.1, 3.0, 3.0]))
    def turn(self, seconds: float) -> None:
        self.desk.turn(seconds)

    @rule(back=st.integers(-2, 6), post=st.integers(0, 3))
    def keep(self, back: int, post: int) -> None:
        self.desk.keep(max(0, max(self.at) - back), post=post)

    @rule(count=st.integers(1, 5))
    def commit(self, count: int) -> None:
        self.desk.lanes.commit(count)

    @rule(reason=st.sampled_from([DropReason.DISK_FULL, DropReason.QUOTA]))
    def refuse(self, reason: DropReason) -> None:
        for _ in self.desk.lanes.jobs[:3]:
            self.desk.lanes.refuse(reason)

    @rule(is_full=st.booleans())
    def disk(self, is_full: bool) -> None:
        self.is_full = is_full
        self.desk.why_full = "full" if is_full else None

    @rule()
    def kill(self) -> None:
        """What was not acknowledged is sent again by its rank."""
        if self.is_full:
            return
        work = [
            (rank, [item for item, _ in rank.session.in_work.values()]) for rank in self.desk.ranks.values()
        ]
        self.desk.start()
        for rank, items in work:
            for job in self.desk.jobs(rank, items):
                self.desk.take(job)
        self.look()

    @invariant()
    def is_exact(self) -> None:
        if hasattr(self, "desk"):
            self.desk.assert_exact()

    def teardown(self) -> None:
        try:
            if hasattr(self, "desk"):
                self.disk(False)
                self.desk.end()
                self.desk.assert_exact()
                for rank in self.desk.ranks.values():
                    assert not rank.session.held
                    assert not rank.session.in_work
                assert self.desk.files() == []
        finally:
            self.patch.undo()
            shutil.rmtree(self.place)


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
