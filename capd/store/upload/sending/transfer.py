"""The transfer of objects: several threads, bounded memory and bandwidth, checksums of what was really read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from capd.errors import StoreError
from capd.store.disk.failpoints import failpoint
from capd.store.objects.bucket import Bucket, part_nbytes
from capd.store.segments.series_table import ShardObject
from capd.store.upload.local_files import KnownFiles, OpenShard, extended_crc32c
from capd.store.upload.plan import PlannedDocument, PlannedShard
from capd.store.upload.sending.figures import UploadFigures
from capd.store.upload.sending.halt import Halt
from capd.store.upload.sending.pace import Bandwidth, Rate, TransferMemory, no_limit

__all__ = ["MEMORY_NBYTES", "Transfer", "UploadTools"]

logger = logging.getLogger(__name__)

# With what Python and the client hold besides, a daemon grows by about 128 MiB.
MEMORY_NBYTES = 96 << 20
_PIECE_NBYTES = 1 << 20
# An upload in parts keeps two under way and collects the next one.
_PARTS_HELD = 3
_LOOK_S = 0.2


@dataclass(slots=True)
class UploadTools:
    """What all uploads of a process share.

    Attributes:
        threads: The objects that are transferred at a time.
        bandwidth: The limit of the bytes per second.
        memory: The limit of the bytes in memory.
        figures: The counters.
        halt: The request to stop.
    """

    threads: int
    bandwidth: Bandwidth
    memory: TransferMemory
    figures: UploadFigures
    halt: Halt

    @classmethod
    def make(cls, threads: int = 4, rate: Rate = no_limit) -> UploadTools:
        """Return tools of their own for these limits."""
        return cls(threads, Bandwidth(rate), TransferMemory(MEMORY_NBYTES), UploadFigures(), Halt())


class Transfer:
    """The transfers of one round of one node's part of a run."""

    def __init__(
        self,
        bucket: Bucket,
        run: str,
        tools: UploadTools,
        known: KnownFiles,
        doubtful: set[str],
        damage_in: Callable[[PlannedShard], str] = lambda _: "",
    ) -> None:
        """Prepare.

        Args:
            bucket: The place of the run.
            run: The name of the run, for the figures.
            tools: What uploads share.
            known: The checksums of local files.
            doubtful: The keys that may be there already, from an upload that ended in its middle.
            damage_in: Returns what is wrong with the file of a shard; "" if nothing is.
        """
        self._bucket, self._run, self._tools, self._known = bucket, run, tools, known
        self._doubtful, self._damage_in = doubtful, damage_in
        self._lock = threading.Lock()
        self.objects = 0
        self.nbytes = 0

    def each(self, work: Sequence[Callable[[], None]]) -> None:
        """Do some pieces of work in threads. After the first failure no further one begins.

        Raises:
            StoreError: One failed.
            OSError: One failed.
        """
        waiting = list(reversed(work))
        failures: list[BaseException] = []

        def run() -> None:
            while not failures:
                with self._lock:
                    if not waiting:
                        return
                    one = waiting.pop()
                try:
                    self._tools.halt.check()
                    one()
                except BaseException as error:
                    failures.append(error)

        # No executor: its threads keep an interpreter from ending while a server does not answer.
        threads = [
            threading.Thread(target=run, name="capd-upload-object", daemon=True)
            for _ in range(min(self._tools.threads, len(work)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                # A request that hangs is given up with the process.
                self._tools.halt.check_in_hand()
        if failures:
            raise failures[0]

    def shard(self, planned: PlannedShard) -> ShardObject:
        """Upload a shard, unless these bytes are there already. Return what is there.

        Raises:
            StoreError: It cannot be read or written.
        """
        failpoint("upload.before_shard")
        try:
            with OpenShard(planned.path) as file:
                if file.is_stub:
                    # Its stub must never take the place of the object that it names.
                    raise StoreError(f"{planned.path} was moved; the next round looks again", retry=True)
                crc = self._known.crc32c(planned.key, file.version)
                crc = file.crc32c() if crc is None else crc
                found = ShardObject(planned.number, file.version.nbytes, crc)
                if (before := planned.before) is not None and self._is_worse(planned, found):
                    # The version of this file is known to have no better bytes than the object.
                    found, crc = before, before.crc32c
                if before != found and not self._is_there(planned.key, found):
                    self._put_file(planned.key, file, crc)
                else:
                    self._tools.figures.skipped(self._run, found.nbytes)
        except FileNotFoundError as error:
            raise StoreError(f"{planned.path} is gone; the next round looks again", retry=True) from error
        with self._lock:
            self._known.note(planned.key, file.version, crc)
        failpoint("upload.after_shard")
        return found

    def document(self, planned: PlannedDocument) -> None:
        """Upload a document. Raises ObjectStoreError."""
        self.put(planned.key, planned.payload, planned.crc32c)

    def put(self, key: str, payload: bytes, crc32c: int, condition: str | None = None) -> str | None:
        """Upload a small object whole, and return its entity tag. Raises ObjectStoreError."""
        self._tools.bandwidth.take(len(payload), self._tools.halt)
        etag = self._bucket.put(key, payload, condition=condition, crc32c=crc32c)
        self._wrote(len(payload), is_shard=False)
        return etag

    def put_file(self, key: str, file: OpenShard, crc32c: int) -> None:
        """Upload a file that is no shard. Raises ObjectStoreError."""
        self._put_file(key, file, crc32c, is_shard=False)

    def _put_file(self, key: str, file: OpenShard, crc32c: int, *, is_shard: bool = True) -> None:
        nbytes, tools = file.version.nbytes, self._tools
        part = part_nbytes(nbytes)
        with tools.memory.held(min(2 * nbytes, _PARTS_HELD * part) + _PIECE_NBYTES, tools.halt):
            pieces = _Pieces(file, crc32c, tools)
            if nbytes <= part:
                self._bucket.put(key, b"".join(pieces), crc32c=crc32c)
            else:
                try:
                    self._bucket.put_file(key, iter(pieces), nbytes, crc32c)
                except Exception:
                    # The client may wrap the error of the iterator.
                    if pieces.failure is not None:
                        raise pieces.failure from None
                    raise
        self._wrote(nbytes, is_shard=is_shard)

    def _is_there(self, key: str, found: ShardObject) -> bool:
        """Return whether an interrupted upload already wrote these bytes."""
        if key not in self._doubtful:
            return False
        head = self._bucket.head(key)
        return head is not None and (head.nbytes, head.crc32c) == (found.nbytes, found.crc32c)

    def _is_worse(self, planned: PlannedShard, found: ShardObject) -> bool:
        """Return whether a file is damaged that must not take the place of its object. A continued one is longer."""
        before = planned.before
        if before is None or found == before or found.nbytes > before.nbytes:
            return False
        damage = self._damage_in(planned)
        if damage:
            logger.warning(
                "[upload] %s is damaged (%s); the object store keeps what was uploaded, and `capd verify` tells more",
                planned.path, damage,
            )  # fmt: skip
        return bool(damage)

    def _wrote(self, nbytes: int, *, is_shard: bool) -> None:
        with self._lock:
            self.objects += 1
            self.nbytes += nbytes
        self._tools.figures.wrote(self._run, nbytes, is_shard=is_shard)


class _Pieces:
    """The pieces of a file, at the pace of the bandwidth. Other bytes than those of the checksum are an error."""

    def __init__(self, file: OpenShard, crc32c: int, tools: UploadTools) -> None:
        self._file, self._expected, self._tools = file, crc32c, tools
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        tools, crc, left = self._tools, 0, self._file.version.nbytes
        try:
            for piece in self._file.pieces(tools.bandwidth.piece_nbytes(_PIECE_NBYTES)):
                tools.halt.check_in_hand()
                crc = extended_crc32c(crc, piece)
                left -= len(piece)
                # Before the last piece: an object never appears with other bytes than its checksum says.
                if not left and crc != self._expected:
                    raise StoreError(
                        "a shard changed while it was uploaded; the next round looks again", retry=True
                    )
                tools.bandwidth.take(len(piece), tools.halt)
                yield piece
        except Exception as error:
            self.failure = error
            raise
