"""Drives one run store as the daemon does, in one thread and deterministically, through ends of the process.

The append thread's own code groups, syncs, acknowledges and maintains; only its queue, its clock and the pool that
encodes are left out. A life lasts from a start of the store to a kill, a power loss or a close; each crash goes on
in a new directory, with what it left.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from capd.errors import StoreError
from capd.server.pipeline import append_thread
from capd.server.pipeline.jobs import Booked, RecordJob, Task, Tickets, plan_of
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk import files as store_files
from capd.store.disk import open_files, power
from capd.store.format import geometry
from capd.store.format.encode import ChunkResult, as_array, encode_chunk
from capd.store.format.packed_statistics import pack
from capd.store.format.statistics import summarise
from capd.store.run.options import StoreOptions
from capd.store.run.run_store import RunStore
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor
from capd_client.protocol.statistics_row import ROW_NBYTES
from tests.property.kit.faulty_files import FaultyFiles, Killed
from tests.property.kit.lossy_disk import LossyDisk

__all__ = ["RUN_ID", "Crash", "Offer", "StoreDriver"]

RUN_ID, NODE = "run", "n0"
Mode = Literal["kill", "power"]


@dataclass(frozen=True)
class Crash:
    """An end without warning. seed: of what a power loss leaves."""

    mode: Mode
    seed: int


@dataclass
class Offer:
    """One record as a client offers it; the moment's iteration is its identity. payload: whether the elements are
    to be kept, and not the statistics alone."""

    identity: int
    client: bytes
    sequence: int
    key: Key
    dtype: str
    bits: NDArray[np.generic]
    payload: bool = True

    @property
    def kept(self) -> NDArray[np.generic]:
        """What its series' array must hold of it."""
        if self.payload:
            return self.bits
        return np.frombuffer(pack(summarise(self.bits, self.dtype)))


@dataclass
class Outcomes:
    """A sink: what the daemon said of the offers, by identity."""

    acked: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Sink:
    identity: int
    outcomes: Outcomes

    def committed(self, sequences: Sequence[int]) -> None:
        self.outcomes.acked.add(self.identity)

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        self.outcomes.refused.add(self.identity)


class StoreDriver:
    """One store below `base`, through all its lives. Undo `patch` and call `close` in the end."""

    def __init__(self, patch: pytest.MonkeyPatch, base: Path, options: StoreOptions) -> None:
        self._base, self._options, self._lives = base, options, 0
        root = self._next_root()
        root.mkdir()
        self.files = FaultyFiles(patch, LossyDisk(root, f"{RUN_ID}.zarr/.capd/node={NODE}/{CATALOG_NAME}"))
        _shrink_units(patch)
        self._mounts = 0
        patch.setattr(power, "mount_of", lambda path: f"mount {self._mounts}")
        self.outcomes = Outcomes()
        self._store: RunStore | None = None

    @property
    def root(self) -> Path:
        """The store root of this life."""
        return self.files.disk.root

    @property
    def run(self) -> Path:
        """The run's directory in this life."""
        return self.root / f"{RUN_ID}.zarr"

    @property
    def store(self) -> RunStore:
        """The open store."""
        assert self._store is not None
        return self._store

    @property
    def has_failed(self) -> bool:
        """Whether the store accepts no more records because the disk lost unsynced data."""
        return self._store is not None and bool(self._store._syncing.failed)

    def _next_root(self) -> Path:
        self._lives += 1
        return self._base / f"life-{self._lives}"

    # -- a life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the store. Raises StoreError or OSError."""
        runs: dict[str, RunStore] = {}
        self._thread = append_thread.AppendThread(
            runs, Booked(1 << 30), Tickets(), statistics=self._options.statistics
        )
        self._store = runs[RUN_ID] = RunStore(self.root, RUN_ID, NODE, self._options)

    def append(self, offers: list[Offer]) -> None:
        """Offer records, wait until each is acknowledged or refused, and do what they leave to do."""
        self._thread._work([self._task(offer) for offer in offers])

    def stop(self) -> None:
        """Close the store without sealing it."""
        store, self._store = self._store, None
        try:
            if store is not None:
                store.close()
        finally:
            self.files.abandon()
            self.files.disk.forgive()

    def arm(self, crash: Crash, passes: int) -> None:
        """Let the process end at a failpoint, behind `passes` others."""
        self.files.kill_after(passes, lambda: self._take_image(crash))

    def crash(self, crash: Crash) -> None:
        """End the process now."""
        self._take_image(crash)
        self.bury()

    def _take_image(self, crash: Crash) -> None:
        target = self._next_root()
        if crash.mode == "kill":
            self._left = self.files.disk.after_kill(target)
        else:
            self._left = self.files.disk.after_power_loss(Random(crash.seed), target)
            self._mounts += 1

    def bury(self) -> None:
        """Clean up after the dead process; its disk is what it left."""
        self._store = None
        self.files.abandon()
        self.files.disk.close()
        shutil.rmtree(self.root)
        self.files.disk = self._left

    def survive(self, action: Callable[[], object]) -> bool:
        """Do something that a crash may cut short; whether it did not."""
        try:
            action()
        except Killed:
            self.bury()
            return False
        return True

    def close(self) -> None:
        """Leave nothing behind."""
        self.files.abandon()
        self.files.disk.close()

    # -- what the dispatch thread and the pool do ---------------------------------------------------------

    def _task(self, offer: Offer) -> Task:
        bits = offer.bits
        data = memoryview(np.ascontiguousarray(bits).tobytes())
        moment = Moment(iteration=offer.identity)
        descriptor = Descriptor(offer.sequence, 0, bits.nbytes, 0, bits.shape, moment, payload=offer.payload)
        define = Define(id=0, key=offer.key, dtype=offer.dtype)
        sink = _Sink(offer.identity, self.outcomes)
        task = Task(RecordJob(RUN_ID, offer.client, offer.sequence, define, descriptor, data, sink), 0)
        try:
            task.plan = plan_of(self.store, task.job)
        except StoreError as error:
            task.refusal = (DropReason.STORE_ERROR, str(error))
        if task.refusal is None and not task.is_small:
            task.chunks = self._chunks(task)
        return task

    def _chunks(self, task: Task) -> queue.SimpleQueue[tuple[Future[ChunkResult], int] | None]:
        plan, shape = task.plan, task.job.descriptor.shape
        assert plan is not None
        geometry_, chain = plan.geometry, plan.chain
        record = as_array(task.job.data, chain.stored, shape)
        dtype = task.job.define.dtype if self._options.statistics else None
        chunks: queue.SimpleQueue[tuple[Future[ChunkResult], int] | None] = queue.SimpleQueue()
        for ordinal, slices in geometry_.chunks(shape):
            done: Future[ChunkResult] = Future()
            done.set_result(encode_chunk(record, ordinal, slices, geometry_, chain, dtype))
            chunks.put((done, prod(geometry_.chunk) * geometry_.itemsize))
        chunks.put(None)
        return chunks


def _shrink_units(patch: pytest.MonkeyPatch) -> None:
    """The same arithmetic with sizes that make every border come often."""
    for name, nbytes in (
        ("CHUNK_NBYTES", ROW_NBYTES + 8),
        ("SMALL_NBYTES", ROW_NBYTES + 8),
        ("BATCH_NBYTES", 96),
    ):
        patch.setattr(geometry, name, nbytes)
    patch.setattr(geometry, "MAX_SHARD_RECORDS", 16)
    for module in (store_files, open_files):
        patch.setattr(module, "GROUP_SYNC_ABOVE", 6)
    patch.setattr(append_thread, "_GROUP_S", 1e9)  # the group ends with the batch, not with the clock
