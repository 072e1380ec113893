"""Puts imported records into a run store: planned in order, encoded by a pool, committed in order."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from capd.errors import StoreFull
from capd.pt_files.dictionary import Capture
from capd.pt_files.files import ImportSource
from capd.store.format.codec_choice import SAMPLE_NBYTES
from capd.store.format.encode import ChunkResult, encode_chunk, summarise_small
from capd.store.format.frames import RecordRow, StatsRow
from capd.store.format.statistics import merge
from capd.store.run.run_store import RunStore
from capd.store.shards.series import Plan

__all__ = ["DiskCheck", "ImportWriter", "ImportedRecord"]

_TOGETHER = 64
_TOGETHER_NBYTES = 4 << 20
_CATALOG_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ImportedRecord:
    """A record to commit. `file` identifies it; `bits` are its stored elements, with any strides."""

    file: ImportSource
    capture: Capture
    dtype: str
    bits: NDArray[np.generic]


class DiskCheck(Protocol):
    """A check that says why a record of `nbytes` may not be written, or None. `new_series`: it opens a series."""

    def __call__(self, nbytes: int, *, new_series: bool = False) -> str | None: ...


class ImportWriter:
    """A writer of imported records, owned by one thread. It computes all statistics itself."""

    def __init__(self, store: RunStore, pool: ThreadPoolExecutor, limit: DiskCheck | None) -> None:
        self._store, self._pool, self._limit = store, pool, limit
        self._small: list[tuple[Plan, RecordRow, bytes, str]] = []
        self._small_nbytes = 0
        self._next_catalog = time.monotonic() + _CATALOG_INTERVAL_S

    def begin(self, record: ImportedRecord) -> Callable[[], None]:
        """Choose the record's series and start to encode it.

        Returns:
            A function that commits the record. The caller must call these functions in the same order. They raise
            OSError or StoreError.

        Raises:
            StoreFull: If the limit refuses the record.
            StoreError: If the store refuses the record.
        """
        bits = record.bits
        capture = record.capture
        plan = self._store.plan(capture.key, record.dtype, capture.attributes, bits.shape, _sample(bits))
        # A small record goes to the log first and to a shard later.
        copies = 2 if plan.is_small else 1
        if self._limit and (why := self._limit(bits.nbytes * copies, new_series=plan.series is None)):
            raise StoreFull(f"the import stopped; give it again to continue where it stopped: {why}")
        if plan.is_small:
            return partial(self._add_small, plan, record)
        geometry, chain = plan.geometry, plan.chain
        statistics = record.dtype if self._store.options.statistics else None
        chunks = deque(
            self._pool.submit(encode_chunk, bits, ordinal, slices, geometry, chain, statistics)
            for ordinal, slices in geometry.chunks(bits.shape)
        )
        return partial(self._commit_large, plan, record, chunks)

    def flush(self) -> None:
        """Commit the pending small records. Raises OSError or StoreError."""
        small, self._small, self._small_nbytes = self._small, [], 0
        if small:
            stats: Sequence[StatsRow | None] = [None] * len(small)
            if self._store.options.statistics:
                stats = summarise_small([(dtype, data) for _, _, data, dtype in small])
            for (_, row, _, _), found in zip(small, stats, strict=True):
                row.stats = found
            self._store.commit_small([(plan, row, data) for plan, row, data, _ in small])
        self._store.maintain()
        if time.monotonic() >= self._next_catalog:
            self._store.flush_catalog()
            self._next_catalog = time.monotonic() + _CATALOG_INTERVAL_S

    def _add_small(self, plan: Plan, record: ImportedRecord) -> None:
        self._small.append((plan, _row(plan, record), record.bits.tobytes(), record.dtype))
        self._small_nbytes += record.bits.nbytes
        if len(self._small) >= _TOGETHER or self._small_nbytes >= _TOGETHER_NBYTES:
            self.flush()

    def _commit_large(self, plan: Plan, record: ImportedRecord, chunks: deque[Future[ChunkResult]]) -> None:
        # Series get their paths in the order of their first commits.
        if plan.series is None:
            self.flush()
        row = _row(plan, record)
        row.stats = StatsRow() if self._store.options.statistics else None
        self._store.commit(plan, row, _merged(row, chunks))
        self.flush()


def _sample(bits: NDArray[np.generic]) -> memoryview:
    """Return the first bytes of a record in C order. A large view of few bytes is not expanded."""
    count = SAMPLE_NBYTES // bits.itemsize
    first = bits.reshape(-1)[:count] if bits.flags.c_contiguous else bits.flat[:count]
    return first.view(np.uint8).data


def _merged(row: RecordRow, chunks: deque[Future[ChunkResult]]) -> Iterator[ChunkResult]:
    """Yield the chunks in order and release them.

    Their statistics collect in `row`, which is complete when its COMMIT is written.
    """
    while chunks:
        chunk = chunks.popleft().result()
        if row.stats is not None and chunk.stats is not None:
            row.stats = merge(row.stats, chunk.stats)
        yield chunk


def _row(plan: Plan, record: ImportedRecord) -> RecordRow:
    capture = record.capture
    own = capture.attributes != plan.header.attributes
    return RecordRow(
        *record.file.capture,
        record.bits.shape,
        record.bits.nbytes,
        capture.moment,
        capture.device,
        capture.requires_grad,
        capture.is_leaf,
        capture.metadata,
        json.dumps(capture.attributes, sort_keys=True) if own else "",
    )
