"""Reads the elements of records: decodes the chunks of a region in parallel into the result.

Every chunk is checked against its crc32c, and every record against its COMMIT frame (`capd.store.read.locate`). An
element that cannot be read exactly raises DamagedRecord. No value is ever filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError, DamagedRecord
from capd.store.arrays.region import Piece, Region, Selection, select
from capd.store.documents.headers import fits
from capd.store.format.codecs import Chain, Encoded, chain_for, crc32c
from capd.store.format.decode import decode_into
from capd.store.format.dtypes import stored_shape
from capd.store.format.encode import as_array
from capd.store.format.frames import RecordHead, SeriesHeader
from capd.store.read.locate import Locator
from capd.store.read.parallel import Job, run_jobs
from capd.store.read.recent import Recent
from capd.store.read.shard_file import FileCache, Place, ShardFile
from capd.store.read.source import RunNode
from capd.store.remote.moved_objects import MovedObjects
from capd.store.remote.node import RemoteNode
from capd.store.remote.shard import ShardWindows

__all__ = ["ReadTools", "RecordReader"]

_OPEN_FILES = 32
# Decoded chunks that small records share, up to 1 MiB each.
_KEPT_CHUNKS = 64
_KEPT_PLANS = 16
_CRC_NBYTES = 4
ReadFile: TypeAlias = ShardFile | ShardWindows
Made = TypeVar("Made")


@dataclass(slots=True)
class ReadTools:
    """The caches that all series of a Store share: open files, decoded chunks of small records, and object stores."""

    files: FileCache = field(default_factory=lambda: FileCache(_OPEN_FILES))
    chunks: Recent[tuple[Hashable, Place], NDArray[np.generic]] = field(
        default_factory=lambda: Recent(_KEPT_CHUNKS)
    )
    objects: MovedObjects = field(default_factory=MovedObjects)


class _Plan(NamedTuple):
    """The plan for reading a region of records of one shape.

    ordinals: all chunks of the record, touched or not. wanted: those of the pieces.
    """

    shape: tuple[int, ...]
    selection: Selection
    pieces: tuple[Piece, ...]
    ordinals: tuple[int, ...]
    wanted: tuple[int, ...]


class RecordReader:
    """A reader for the records of one series of one node."""

    def __init__(self, node: RunNode, header: SeriesHeader, tools: ReadTools) -> None:
        self._node, self._header, self._chunks = node, header, tools.chunks
        self._locator = (
            node.locator(header)
            if isinstance(node, RemoteNode)
            else Locator(node, header, tools.files, tools.objects)
        )
        # The plans of whole records, by shape.
        self._whole: Recent[tuple[int, ...], _Plan] = Recent(_KEPT_PLANS)

    @property
    def _chain(self) -> Chain:
        return chain_for(self._header.codec, self._header.dtype)

    def read(self, number: int, record: RecordHead, region: Region) -> NDArray[np.generic]:
        """Return the stored bits of a region of record `number` as a new, writable, C-contiguous array.

        Raises:
            DamagedRecord: An element cannot be read exactly.
            StoreError: A file cannot be read.
            CapdError: `region` is not a valid region of the record.
        """
        plan = self._plan(number, record, region)
        out = np.empty(plan.selection.extents, dtype=self._chain.stored)
        self._renewing([number], lambda: run_jobs(self._jobs(number, record, plan, out)))
        return out.reshape(plan.selection.shape)

    def _renewing(self, numbers: Sequence[int], read: Callable[[], Made]) -> Made:
        """Read records. If one is damaged and its shard has changed since it was opened, read them once more."""
        try:
            return read()
        except DamagedRecord:
            of_shard = {number // self._header.geometry.shard_records: number for number in numbers}
            # Each of them, not only the first one that has changed.
            renewed = [self._locator.renew(number) for number in of_shard.values()]
            if not any(renewed):
                raise
            return read()

    def encoded(self, number: int, record: RecordHead) -> list[tuple[int, Encoded]]:
        """Return the stored chunks of a record that shares none, with their ordinals.

        Raises:
            DamagedRecord: A chunk is damaged, or the record is not in a shard.
            StoreError: A file cannot be read.
        """
        return self._renewing([number], lambda: self._encoded(number, record))

    def _encoded(self, number: int, record: RecordHead) -> list[tuple[int, Encoded]]:
        plan = self._plan(number, record, ...)
        file, places, raw = self._locator.find(number, record, plan.ordinals, plan.ordinals)
        if raw is not None or self._header.geometry.batch > 1:
            raise self._locator.damage(number, "it has no chunks of its own", file.path)
        found: list[tuple[int, Encoded]] = []
        for ordinal in plan.ordinals:
            offset, nbytes = places[ordinal]
            try:
                payload = file.read((offset, nbytes))
            except OSError as error:
                raise self._locator.failure(number, error, file.path) from error
            encoded = Encoded.of(payload)
            if len(payload) != nbytes or nbytes < _CRC_NBYTES or crc32c(encoded.body) != encoded.crc:
                raise self._locator.damage(number, "a chunk does not match its checksum", file.path)
            found.append((ordinal, encoded))
        return found

    def prepare(self, records: Sequence[tuple[int, RecordHead]]) -> None:
        """Prepare the reading of whole records, which are fetched together from an object store."""
        of_shape: dict[tuple[int, ...], list[tuple[int, RecordHead]]] = {}
        for number, record in records:
            of_shape.setdefault(record.shape, []).append((number, record))
        for alike in of_shape.values():
            plan = self._plan(*alike[0], ...)
            self._locator.prepare([number for number, _ in alike], plan.ordinals, plan.wanted)

    def stack(self, records: Sequence[tuple[int, RecordHead]], region: Region) -> NDArray[np.generic]:
        """Return the same region of several records of one shape, as [records, *region].

        Raises:
            DamagedRecord: An element cannot be read exactly.
            StoreError: A file cannot be read.
            CapdError: The records do not all have one shape, or `region` is not a valid region.
        """
        shapes = {stored_shape(self._header.dtype, record.shape) for _, record in records}
        if len(shapes) != 1:
            known = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2]) or "no record at all"
            raise CapdError(f"{self._header.path}: only records of one shape can be stacked, not {known}")
        plan = self._plan(*records[0], region)
        out = np.empty((len(records), *plan.selection.extents), dtype=self._chain.stored)
        numbers = [number for number, _ in records]

        def read() -> None:
            self._locator.prepare(numbers, plan.ordinals, plan.wanted)
            jobs = (
                job
                for at, (number, record) in enumerate(records)
                for job in self._jobs(number, record, plan, out[at, ...])
            )
            if self._header.geometry.batch > 1:
                # Neighbours share a chunk. One thread decodes it only once.
                for job in jobs:
                    job()
            else:
                run_jobs(jobs)

        self._renewing(numbers, read)
        return out.reshape((len(records), *plan.selection.shape))

    def _plan(self, number: int, record: RecordHead, region: Region) -> _Plan:
        geometry, shape = self._header.geometry, stored_shape(self._header.dtype, record.shape)
        if not fits(self._header, record.shape, record.nbytes):
            what = f"a shape of {list(shape)} with {record.nbytes} bytes does not fit the series"
            raise self._locator.damage(number, what, self._node.directory)
        plan = self._whole.get(shape) if region is Ellipsis else None
        if plan is None:
            selection = select(region, shape)
            ordinals = tuple(ordinal for ordinal, _ in geometry.chunks(shape))
            pieces = tuple(selection.pieces(geometry))
            plan = _Plan(shape, selection, pieces, ordinals, tuple(piece.ordinal for piece in pieces))
            if region is Ellipsis:
                self._whole.put(shape, plan)
        return plan

    def _jobs(self, number: int, record: RecordHead, plan: _Plan, out: NDArray[np.generic]) -> Iterator[Job]:
        """Find the record. Yield one decoding job per chunk of the region."""
        file, places, raw = self._locator.find(number, record, plan.ordinals, plan.wanted)
        if raw is not None:
            out[...] = as_array(raw, self._chain.stored, plan.shape)[plan.selection.slices]
            return
        for piece in plan.pieces:
            yield partial(self._fill, number, file, places[piece.ordinal], piece, out)

    def _fill(
        self, number: int, file: ReadFile, place: Place, piece: Piece, out: NDArray[np.generic]
    ) -> None:
        # Without the Ellipsis, indexing a record without axes would return a scalar.
        target: NDArray[np.generic] = out[(*piece.target, ...)]  # type: ignore[arg-type]
        batch = self._header.geometry.batch
        try:
            if batch > 1:
                target[...] = self._shared_chunk(file, place)[number % batch][piece.source]
            elif piece.whole and target.flags.c_contiguous:
                decode_into(self._chain, file.read(place), target)
            else:
                target[...] = self._decoded(file, place)[0][piece.source]
        except DamagedRecord as error:
            raise self._locator.damage(number, error, file.path) from error
        except OSError as error:
            raise self._locator.failure(number, error, file.path) from error

    def _shared_chunk(self, file: ReadFile, place: Place) -> NDArray[np.generic]:
        chunk = self._chunks.get((file.identity, place))
        if chunk is None:
            chunk = self._decoded(file, place)
            self._chunks.put((file.identity, place), chunk)
        return chunk

    def _decoded(self, file: ReadFile, place: Place) -> NDArray[np.generic]:
        geometry = self._header.geometry
        chunk = np.empty((geometry.batch, *geometry.chunk), dtype=self._chain.stored)
        decode_into(self._chain, file.read(place), chunk)
        return chunk
