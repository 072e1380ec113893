"""A state machine over a run store: work, kills, power losses and bad disks in any order. `StoreModel` judges."""

from __future__ import annotations

import errno
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from capd.errors import CapdError, StoreError
from capd.store.run.options import StoreOptions
from capd.store.run.run_store import RunStore
from tests.property.kit.faulty_files import Fault
from tests.property.kit.observing import read_with_capd
from tests.property.kit.store_driver import Crash, StoreDriver
from tests.property.kit.store_model import SHAPES, StoreModel

__all__ = ["StoreMachine"]

Item = tuple[int, int, int, bool]  # series, client, length, whether its content comes again and again
seeds = st.integers(0, 2**32 - 1)
crashes = st.builds(Crash, st.sampled_from(("kill", "power")), seeds)
items = st.tuples(st.integers(0, len(SHAPES) - 1), st.integers(0, 1), st.integers(0, 4), st.booleans())
batches = st.lists(items, min_size=1, max_size=8)
faults = st.builds(
    Fault,
    st.sampled_from(("sync", "sync", "write", "rename")),
    st.integers(0, 8),
    st.sampled_from((1, 1, 2, 1000)),
    st.sampled_from((errno.EIO, errno.ENOSPC)),
    st.booleans(),
)


class StoreMachine(RuleBasedStateMachine):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._base = Path(tempfile.mkdtemp(prefix="capd-model-", dir=_scratch()))
        self._driver: StoreDriver | None = None

    @property
    def driver(self) -> StoreDriver:
        assert self._driver is not None
        return self._driver

    def teardown(self) -> None:
        try:
            if self._driver is not None and sys.exc_info()[0] is None:
                self._end()
        finally:
            if self._driver is not None:
                self._driver.close()
            self._patch.undo()
            shutil.rmtree(self._base)

    def _end(self) -> None:
        """Whatever came before: a start, a seal, and everything that was promised is there for everybody."""
        self.driver.files.calm()
        self.model.stop_and_start()
        try:
            self.driver.store.seal()
        except StoreError:
            assert self.model.damaged, "a seal failed without a fault"
        self.model.compare(read_with_capd(self.driver.run), self.model.acked)
        self.model.check_plain(complete=not self.model.damaged)

    # -- the store's work ---------------------------------------------------------------------------------

    @initialize(durable=st.booleans(), statistics=st.booleans())
    def begin(self, durable: bool, statistics: bool) -> None:
        options = StoreOptions(
            codec="default",
            statistics=statistics,
            shard_nbytes=8192,
            log_nbytes=600,
            open_files=3,
            durability="durable" if durable else "buffered",
        )
        self._driver = StoreDriver(self._patch, self._base, options)
        self.model = StoreModel(self.driver, durable=durable)
        self.driver.start()

    @rule(batch=batches)
    def append(self, batch: list[Item]) -> None:
        self.model.offer([self.model.new(*item) for item in batch])

    @rule()
    def send_again(self) -> None:
        """What a client does behind a reconnect: what has no answer and is not committed.

        Without a precondition: whether there is anything may depend on the clock, which Hypothesis takes for a mistake.
        """
        self.model.offer([self.model.offers[identity] for identity in sorted(self.model.open)])

    @rule()
    def seal(self) -> None:
        self.model.seal()

    @rule()
    def tidy(self) -> None:
        self.model.attempt(lambda: self.driver.store.flush_catalog())
        self.model.attempt(lambda: self.driver.store.maintain())

    @rule()
    def close_and_open(self) -> None:
        self.model.stop_and_start()

    # -- what goes wrong ----------------------------------------------------------------------------------

    @rule(fault=faults, batch=batches)
    def append_to_a_bad_disk(self, fault: Fault, batch: list[Item]) -> None:
        self._break(fault)
        self.model.offer([self.model.new(*item) for item in batch])

    @rule(fault=faults)
    def seal_on_a_bad_disk(self, fault: Fault) -> None:
        self._break(fault)
        self.model.seal()

    @rule(crash=crashes)
    def crash(self, crash: Crash) -> None:
        self.driver.crash(crash)
        self.model.start_after(crash)

    @rule(crash=crashes, after=st.integers(0, 30), batch=batches)
    def crash_while_appending(self, crash: Crash, after: int, batch: list[Item]) -> None:
        self._arm(crash, after)
        self.model.offer([self.model.new(*item) for item in batch])

    @rule(crash=crashes, after=st.integers(0, 30))
    def crash_while_sealing(self, crash: Crash, after: int) -> None:
        self._arm(crash, after)
        self.model.seal()

    @rule(crash=crashes, second=crashes, after=st.integers(0, 15))
    def crash_in_recovery(self, crash: Crash, second: Crash, after: int) -> None:
        self.driver.crash(crash)
        self._arm(second, after)
        self.model.start_after(crash)

    @rule(choice=seeds, position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def damage_a_copy(self, choice: int, position: float, bit: int) -> None:
        """One flipped bit in any file: what is read is what was captured, or an error, also behind a recovery."""
        copy = self._base / "damaged"
        shutil.copytree(self.driver.root, copy, ignore=shutil.ignore_patterns("*-shm"))
        try:
            files = sorted(p for p in copy.rglob("*") if p.is_file() and p.stat().st_size)
            if not files:
                return
            file = files[choice % len(files)]
            content = bytearray(file.read_bytes())
            content[int(position * len(content))] ^= 1 << bit
            file.write_bytes(content)
            by_moment = not file.name.startswith("catalog.sqlite")
            run = copy / self.driver.run.name
            self.model.check_values(read_with_capd(run), by_moment=by_moment)
            with self.driver.files.resting():
                try:
                    RunStore(copy, "run", "n0", self.driver.store.options).close()
                except CapdError:
                    return
            self.model.check_values(read_with_capd(run), by_moment=by_moment)
        finally:
            shutil.rmtree(copy)

    # -- what readers see ---------------------------------------------------------------------------------

    @rule()
    def read(self) -> None:
        seen = read_with_capd(self.driver.run)
        self.model.compare(seen, self.model.acked)
        assert set(seen.identities()) <= self.model.acked | self.model.open | self.model.unsure

    @rule()
    def read_plainly(self) -> None:
        self.model.check_plain()

    # -- the model ----------------------------------------------------------------------------------------

    def _break(self, fault: Fault) -> None:
        """From now on, and until it has failed so often as it is to or a start fails."""
        evict = fault.evict and self.model.durable  # buffered may lose what a disk lost before it was synced
        self.driver.files.fault = replace(fault, evict=evict)

    def _arm(self, crash: Crash, after: int) -> None:
        self.model.armed = crash
        self.driver.arm(crash, after)


def _scratch() -> str | None:
    """Memory, where there is some to write to: the tree is copied at every crash."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
