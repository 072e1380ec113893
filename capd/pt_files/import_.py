"""Reads tensor_saver's files into a run: checked and loaded by a few threads, committed in order.

A file is known by its path and size, as a capture is by client and sequence. So an import that was interrupted goes on
where it was, and one that is repeated adds only what is new. A bad file costs itself alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.ahead import AHEAD_NBYTES, ahead
from capd.errors import StoreFull
from capd.pt_files.dictionary import capture_of
from capd.pt_files.files import TensorFile
from capd.pt_files.load import load_tensor_file, opened
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import DiskCheck, ImportedRecord, ImportWriter
from capd.store.format.dtypes import stored_type
from capd.store.format.ranges import RangeSet
from capd.store.run.run_store import RunStore
from capd_client.protocol.dtypes import SUPPORTED_DTYPES
from capd_client.protocol.key import MAX_NDIM

__all__ = ["LoadedFile", "Outcome", "import_files", "load_file"]

_MAX_EXPANSION = 64
"""The most that a tensor may be larger than the bytes that it views (keys expanded over query heads, say)."""
_MAX_EXTENTS_NBYTES = 1 << 44
"""The limit for a tensor without elements, whose other extents still become chunks; the daemon has it, too."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a file: committed, there already, or refused for a reason."""

    file: TensorFile
    raw_nbytes: int = 0
    already: bool = False
    problem: str | None = None


def import_files(
    store: RunStore,
    files: Sequence[TensorFile],
    *,
    threads: int,
    layer_base: int = 0,
    limit: DiskCheck | None = None,
) -> Iterator[Outcome]:
    """Import files in order; yields what became of each, in that order. All are committed when the iterator ends.

    Raises StoreFull where `limit` refuses a record, OSError or StoreError where the store fails; what was committed
    until then is kept.
    """
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="capd-import") as loading,
        ThreadPoolExecutor(threads, thread_name_prefix="capd-encode") as encoding,
    ):
        job = _Import(store, ImportWriter(store, encoding, limit), loading, layer_base)
        try:
            yield from job.run(files)
        except BaseException:
            loading.shutdown(cancel_futures=True)
            encoding.shutdown(cancel_futures=True)
            raise


class _Import:
    def __init__(
        self, store: RunStore, writer: ImportWriter, pool: ThreadPoolExecutor, layer_base: int
    ) -> None:
        self._store, self._writer, self._pool, self._layer_base = store, writer, pool, layer_base
        self._known: dict[bytes, RangeSet] = {}

    def run(self, files: Sequence[TensorFile]) -> Iterator[Outcome]:
        # Half of the memory for what is loaded, the other half for what is encoded from it.
        loaded = ahead(files, self._begin, lambda file: file.nbytes, AHEAD_NBYTES // 2)
        for item, write in ahead(self._ready(loaded), self._plan, _nbytes, AHEAD_NBYTES // 2):
            if write is not None:
                write()
            yield item if isinstance(item, Outcome) else Outcome(item.file, item.record.bits.nbytes)
        self._writer.flush()

    def _begin(self, file: TensorFile) -> Future[LoadedFile] | None:
        client, sequence = file.capture
        if client not in self._known:
            self._known[client] = RangeSet(self._store.committed(client))
        if sequence in self._known[client]:
            return None
        return self._pool.submit(load_file, file, self._layer_base)

    def _ready(
        self, loaded: Iterator[tuple[TensorFile, Future[LoadedFile] | None]]
    ) -> Iterator[LoadedFile | Outcome]:
        for file, future in loaded:
            if future is None:
                yield Outcome(file, already=True)
                continue
            try:
                yield future.result()
            except BadTensorFile as error:
                yield Outcome(file, problem=str(error))
            except (
                OSError,
                RuntimeError,
                MemoryError,
            ) as error:  # the disk, or torch, which lacks memory, say
                yield Outcome(file, problem=f"it cannot be read: {str(error).partition(chr(10))[0][:200]}")

    def _plan(self, item: LoadedFile | Outcome) -> Callable[[], None] | None:
        if isinstance(item, Outcome):
            return None
        try:
            return self._writer.begin(item.record)
        except StoreFull as error:
            return partial(self._stop, error)

    def _stop(self, full: StoreFull) -> None:
        """A record that was looked at ahead found no room; by now those before it are committed."""
        self._writer.flush()
        raise full


@dataclass(frozen=True, slots=True)
class LoadedFile:
    """A tensor file and the record that it is."""

    file: TensorFile
    record: ImportedRecord


def _nbytes(item: LoadedFile | Outcome) -> int:
    return item.record.bits.nbytes if isinstance(item, LoadedFile) else 0


def load_file(file: TensorFile, layer_base: int) -> LoadedFile:
    """Check and load one file. Raises BadTensorFile, OSError, or what torch raises when it lacks memory."""
    if file.path.suffix.lower() == ".pkl":
        raise BadTensorFile("it is a plain pickle, which could hold any code, and is never read")
    with opened(file.path) as stream:
        found = load_tensor_file(stream)
    capture = capture_of(found, file.name, file.directory.name, layer_base)
    dtype, bits = _bits(found["tensor"])
    return LoadedFile(file, ImportedRecord(*file.capture, capture, dtype, bits))


def _bits(tensor: Any) -> tuple[str, NDArray[np.generic]]:
    """dtype and stored bits of a loaded tensor, in its memory and with its strides: a view of few bytes stays small."""
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
    bits: NDArray[np.generic] = tensor.detach().resolve_neg().view(_bits_of(item_nbytes)).numpy()
    return dtype, bits.view(stored_type(dtype).stored)


def _bits_of(item_nbytes: int) -> Any:
    """The torch dtype that elements are viewed as: numpy lacks some, and a view as one of their size needs no copy."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_nbytes]
