"""Copies records into a new run, one after another, with their moments, statistics and metadata.

Chunks of large records are taken as they are, unless they get another codec. Small records share chunks with others, so
they are encoded again. A record that the new run already has is skipped, so a killed command continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.copying.files import Progress
from capd.store.format.codec_choice import SAMPLE_NBYTES
from capd.store.format.dtypes import kept_of, statistics_of
from capd.store.format.encode import ChunkResult, encode_chunk, summarise_small
from capd.store.format.frames import RecordRow, SeriesHeader
from capd.store.format.packed_statistics import pack
from capd.store.format.ranges import RangeSet
from capd.store.read.series import Series
from capd.store.run.options import StoreOptions, open_files_within
from capd.store.run.run_store import RunStore
from capd.store.shards.series import Plan
from capd_client.protocol.scalars import is_scalar

__all__ = ["RecordWriter", "open_file_limit"]

_TOGETHER = 64
_TOGETHER_NBYTES = 4 << 20


def open_file_limit() -> int:
    """Return the number of files that a writer may keep open."""
    import resource

    return open_files_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class RecordWriter:
    """The writer of the records of a new run, of all its nodes; a context manager."""

    def __init__(
        self,
        root: Path,
        name: str,
        progress: Progress,
        *,
        codec: str | None = None,
        statistics_only: bool = False,
        threads: int = 1,
    ) -> None:
        """Write to the run `name` below `root`.

        Args:
            root: A directory that holds this run alone.
            name: The name of the run, without `.zarr`.
            progress: Called with the raw bytes of each record.
            codec: The codec of all tensors; None: that of the source.
            statistics_only: Keep only the statistics of tensors.
            threads: The threads that encode.
        """
        self._root, self._name, self._progress = root, name, progress
        self._codec, self._statistics_only = codec, statistics_only
        self._pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="capd-copy")
        self._stores: dict[str, RunStore] = {}
        self._known: dict[tuple[str, bytes], RangeSet] = {}
        self._small: list[tuple[Plan, RecordRow, bytes]] = []
        self._small_of: RunStore | None = None
        self.copied = 0

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for store in self._stores.values():
            store.close()

    def store(self, node: str) -> RunStore:
        """Return the writer of a node's part. The first call opens it."""
        name = node or "node0"
        found = self._stores.get(name)
        if found is None:
            options = StoreOptions(codec=self._codec or "auto", open_files=open_file_limit())
            found = self._stores[name] = RunStore(self._root, self._name, name, options)
        return found

    def copy(
        self, series: Series, *, shift: Callable[[RecordRow], int], skip: Callable[[RecordRow], bool]
    ) -> None:
        """Copy the records of a series.

        Args:
            series: The series.
            shift: Returns what is added to the attempt of a record.
            skip: Returns whether a record is left out.

        Raises:
            DamagedRecord: A record cannot be read exactly.
            StoreError: The new run cannot be written.
            OSError: A file cannot be read or written.
        """
        store = self.store(series.node)
        for number in series.numbers:
            row = series.row(number)
            if skip(row) or row.sequence in self._committed(store, series.node, row.client):
                self._progress(row.nbytes)
                continue
            if added := shift(row):
                moment = msgspec.structs.replace(row.moment, attempt=row.moment.attempt + added)
                row = msgspec.structs.replace(row, moment=moment)
            self._write(store, series, number, row)
            self.copied += 1
            self._progress(row.nbytes)
        self._flush()
        store.maintain()
        store.flush_catalog()

    def finish(self) -> None:
        """Seal everything. Raises StoreError and OSError."""
        self._flush()
        for store in self._stores.values():
            store.seal()

    def _committed(self, store: RunStore, node: str, client: bytes) -> RangeSet:
        known = self._known.get((node, client))
        if known is None:
            known = self._known[node, client] = RangeSet(store.committed(client))
        return known

    def _write(self, store: RunStore, series: Series, number: int, row: RecordRow) -> None:
        header = series.header
        if self._statistics_only and kept_of(header.dtype) == "tensor" and not is_scalar(header.key):
            self._write_statistics(store, series, number, row)
            return
        if self._codec is None:
            plan = store.plan_for(header)
            if not plan.is_small:
                row = _with_attributes(row, header, plan)
                nbytes = prod(plan.geometry.chunk) * plan.geometry.itemsize
                chunks = (ChunkResult(o, one, nbytes, None) for o, one in series.encoded(number))
                store.commit(plan, row, chunks)
                return
            self._add(store, plan, _with_attributes(row, header, plan), series.read(number).tobytes())
            return
        bits = series.read(number)
        plan = store.plan(header.key, header.dtype, header.attributes, row.shape, _sample(bits))
        row = _with_attributes(row, header, plan)
        if plan.is_small:
            self._add(store, plan, row, bits.tobytes())
        else:
            store.commit(plan, row, self._encoded(plan, bits))

    def _write_statistics(self, store: RunStore, series: Series, number: int, row: RecordRow) -> None:
        header = series.header
        dtype = statistics_of(header.dtype)
        plan = store.plan(header.key, dtype, header.attributes, row.shape, b"")
        stats = row.stats
        if stats is None:
            [stats] = summarise_small([(header.dtype, series.read(number).tobytes())])
        payload = pack(stats)
        row = _with_attributes(msgspec.structs.replace(row, nbytes=len(payload), stats=stats), header, plan)
        self._add(store, plan, row, payload)

    def _encoded(self, plan: Plan, bits: NDArray[np.generic]) -> Iterator[ChunkResult]:
        geometry, chain = plan.geometry, plan.chain
        futures = [
            self._pool.submit(encode_chunk, bits, ordinal, slices, geometry, chain, None)
            for ordinal, slices in geometry.chunks(bits.shape)
        ]
        return (future.result() for future in futures)

    def _add(self, store: RunStore, plan: Plan, row: RecordRow, data: bytes) -> None:
        if self._small and self._small_of is not store:
            self._flush()
        self._small_of = store
        self._small.append((plan, row, data))
        if len(self._small) >= _TOGETHER or sum(len(one[2]) for one in self._small) >= _TOGETHER_NBYTES:
            self._flush()

    def _flush(self) -> None:
        if self._small and self._small_of is not None:
            self._small_of.commit_small(self._small)
            self._small_of.maintain()
        self._small = []


def _with_attributes(row: RecordRow, header: SeriesHeader, plan: Plan) -> RecordRow:
    """Return the row with attributes of its own, if its series gets others than it had."""
    wanted = json.loads(row.attributes) if row.attributes else header.attributes
    own = "" if wanted == plan.header.attributes else json.dumps(wanted, sort_keys=True)
    return row if own == row.attributes else msgspec.structs.replace(row, attributes=own)


def _sample(bits: NDArray[np.generic]) -> memoryview:
    return bits.reshape(-1)[: SAMPLE_NBYTES // bits.itemsize].view(np.uint8).data
