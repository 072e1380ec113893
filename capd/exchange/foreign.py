"""Reads files of other tools into a run: one file after the other, its tensors committed in order.

A tensor is identified by the path and the size of its file, and by its entry there. So an interrupted import continues
where it stopped, and a repeated one adds only new tensors. A bad file or entry never affects the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from capd.ahead import worker_threads
from capd.pt_files.files import TensorFile
from capd.pt_files.import_ import Outcome
from capd.pt_files.pickle_scan import BadTensorFile
from capd.pt_files.writer import DiskCheck, ImportedRecord, ImportWriter
from capd.store.format.ranges import RangeSet
from capd.store.run.run_store import RunStore

__all__ = ["ForeignFile", "import_foreign"]


class ForeignFile(Protocol):
    """A file of another tool.

    Attributes:
        file: Its place. The records of its entries have the same place with the entry's name.
    """

    @property
    def file(self) -> TensorFile:
        """The file."""

    def read(self) -> Iterable[ImportedRecord | Outcome]:
        """Yield the tensors of the file, or the reason why one cannot be imported.

        Raises:
            BadTensorFile: Nothing of the file can be imported.
            OSError: It cannot be read.
        """


def import_foreign(
    store: RunStore, files: Sequence[ForeignFile], *, threads: int, limit: DiskCheck | None = None
) -> Iterator[Outcome]:
    """Import files in order. All tensors are committed when the iterator ends. One file is in memory at once.

    Yields:
        The outcome of each tensor, in order; one for a file of which nothing can be imported.

    Raises:
        StoreFull: If `limit` refuses a record. Records committed before are kept, as they are for the other errors.
        OSError: If the store's disk fails.
        StoreError: If the store fails.
    """
    known: dict[bytes, RangeSet] = {}
    with worker_threads(threads, "encode") as encoding:
        writer = ImportWriter(store, encoding, limit)
        try:
            for file in files:
                for item in _tensors(file):
                    yield item if isinstance(item, Outcome) else _committed(store, writer, known, item)
        finally:
            writer.flush()


def _tensors(file: ForeignFile) -> Iterator[ImportedRecord | Outcome]:
    try:
        yield from file.read()
    except BadTensorFile as error:
        yield Outcome(file.file, problem=str(error))
    except (OSError, RuntimeError, MemoryError) as error:
        yield Outcome(file.file, problem=f"it cannot be read: {str(error).partition(chr(10))[0][:200]}")


def _committed(
    store: RunStore, writer: ImportWriter, known: dict[bytes, RangeSet], record: ImportedRecord
) -> Outcome:
    client, sequence = record.file.capture
    if client not in known:
        known[client] = RangeSet(store.committed(client))
    if sequence in known[client]:
        return Outcome(record.file, already=True)
    known[client].add(sequence)
    writer.begin(record)()
    return Outcome(record.file, record.bits.nbytes)
