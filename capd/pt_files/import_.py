"""Reads tensor_saver's files into a run: a few threads check and load them, and they are committed in order.

A file is identified by its path and size, as a capture is by client and sequence. So an interrupted import continues
where it stopped, and a repeated one adds only new files. A bad file never affects other files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.errors import StoreFull
from capd.pt_files.dictionary import capture_of
from capd.pt_files.files import ImportSource, TensorFile
from capd.pt_files.load import load_tensor_file, opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import DiskCheck, ImportedRecord, ImportWriter
from capd.store.format.dtypes import stored_type
from capd.store.format.ranges import RangeSet
from capd.store.run.run_store import RunStore
from capd_client.protocol.dtypes import SUPPORTED_DTYPES
from capd_client.protocol.key import MAX_NDIM

__all__ = ["Outcome", "bits_of", "import_files", "load_file"]

_MAX_EXPANSION = 64
"""The largest ratio of a tensor's bytes to the bytes of its storage (keys expanded over query heads, for example)."""
_MAX_EXTENTS_NBYTES = 1 << 44
"""The limit for a tensor without elements, whose other extents still become chunks. The daemon has the same limit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a file: committed, present before, or refused for a reason."""

    file: ImportSource
    raw_nbytes: int = 0
    already: bool = False
    problem: str | None = None


def import_files(
    store: RunStore,
    files: Iterable[ImportSource],
    *,
    threads: int,
    load: Callable[[Any], ImportedRecord],
    limit: DiskCheck | None = None,
) -> Iterator[Outcome]:
    """Import files in order. All are committed when the iterator ends.

    Args:
        store: The run.
        files: The files, or other places of tensors.
        threads: The number of threads that load, and of those that encode.
        load: Reads one of them, such as `load_file`. It raises BadTensorFile for one that is to be skipped.
        limit: Says why a record may not be written.

    Yields:
        The outcome of each file, in order.

    Raises:
        StoreFull: If `limit` refuses a record. Records committed before are kept, as they are for the other errors.
        OSError: If the store's disk fails.
        StoreError: If the store fails.
    """
    with worker_threads(threads, "encode") as encoding, worker_threads(threads, "import") as loading:
        yield from _Import(store, ImportWriter(store, encoding, limit), loading, load).run(files)


class _Import:
    def __init__(
        self,
        store: RunStore,
        writer: ImportWriter,
        pool: ThreadPoolExecutor,
        load: Callable[[Any], ImportedRecord],
    ) -> None:
        self._store, self._writer, self._pool, self._load = store, writer, pool, load
        self._known: dict[bytes, RangeSet] = {}

    def run(self, files: Iterable[ImportSource]) -> Iterator[Outcome]:
        # Half of the memory is for loaded files, the other half for encoded chunks.
        loaded = ahead(files, self._begin, lambda file: file.nbytes, AHEAD_NBYTES // 2)
        for item, write in ahead(self._ready(loaded), self._plan, _nbytes, AHEAD_NBYTES // 2):
            if write is not None:
                write()
            yield item if isinstance(item, Outcome) else Outcome(item.file, item.bits.nbytes)
        self._writer.flush()

    def _begin(self, file: ImportSource) -> Future[ImportedRecord] | None:
        client, sequence = file.capture
        if client not in self._known:
            self._known[client] = RangeSet(self._store.committed(client))
        if sequence in self._known[client]:
            return None
        return self._pool.submit(self._load, file)

    def _ready(
        self, loaded: Iterator[tuple[ImportSource, Future[ImportedRecord] | None]]
    ) -> Iterator[ImportedRecord | Outcome]:
        for file, future in loaded:
            if future is None:
                yield Outcome(file, already=True)
                continue
            try:
                yield future.result()
            except BadTensorFile as error:
                yield Outcome(file, problem=str(error))
            except (OSError, RuntimeError, MemoryError) as error:
                # The disk fails, or torch lacks memory.
                yield Outcome(file, problem=f"it cannot be read: {str(error).partition(chr(10))[0][:200]}")

    def _plan(self, item: ImportedRecord | Outcome) -> Callable[[], None] | None:
        if isinstance(item, Outcome):
            return None
        try:
            return self._writer.begin(item)
        except StoreFull as error:
            return partial(self._stop, error)

    def _stop(self, full: StoreFull) -> None:
        """Raise the refusal of a record that was planned ahead, after all records before it are committed."""
        self._writer.flush()
        raise full


def _nbytes(item: ImportedRecord | Outcome) -> int:
    return 0 if isinstance(item, Outcome) else item.bits.nbytes


def load_file(file: TensorFile, layer_base: int) -> ImportedRecord:
    """Check and load one file. Raises BadTensorFile, OSError, or torch's error when it lacks memory."""
    if file.path.suffix.lower() == ".pkl":
        raise BadTensorFile("it is a plain pickle, which could hold any code, and is never read")
    with opened(file.path) as stream:
        found = load_tensor_file(stream)
    capture = capture_of(found, file.name, file.directory.name, layer_base)
    dtype, bits = bits_of(found["tensor"])
    return ImportedRecord(file, capture, dtype, bits)


def bits_of(tensor: Any) -> tuple[str, NDArray[np.generic]]:
    """Return dtype and stored bits of a loaded tensor, with its memory and strides. A view of few bytes stays small.

    Raises:
        BadTensorFile: The store keeps no such dtype, layout or shape.
    """
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or dtype not in SUPPORTED_DTYPES:
        raise BadTensorFile(f"a tensor of {tensor.dtype} and layout {tensor.layout} cannot be stored")
    if tensor.ndim > MAX_NDIM:
        raise BadTensorFile(f"its tensor has {tensor.ndim} dimensions, more than {MAX_NDIM}")
    shape, item_nbytes = tuple(tensor.shape), tensor.element_size()
    nbytes, held = prod(shape) * item_nbytes, tensor.untyped_storage().nbytes()
    if nbytes > _MAX_EXPANSION * held:
        raise BadTensorFile(f"its tensor is {list(shape)}, {nbytes} bytes, made of {held} bytes")
    if prod(max(1, extent) for extent in shape) * item_nbytes > _MAX_EXTENTS_NBYTES:
        raise BadTensorFile(f"its tensor is {list(shape)}, which is larger than any record")
    bits: NDArray[np.generic] = tensor.detach().resolve_neg().view(_torch_bits(item_nbytes)).numpy()
    return dtype, bits.view(stored_type(dtype).stored)


def _torch_bits(item_nbytes: int) -> Any:
    """Return a torch dtype of this size that numpy has, too, so that a view of the elements needs no copy."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_nbytes]
