"""The upload of one node's part of one run, round by round.

A round publishes what changed since the last one, in an order in which no reader ever sees half of it:

    shards → moments → zarr.json of series → data/zarr.json → groups → records → series → alerts → keeps → manifest

A reader trusts nothing that no manifest names. So a kill at any point leaves the last manifest and everything that it
names. The next process finds by HEAD what was uploaded after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from capd.errors import CapdError, ObjectStoreError, StoreError
from capd.store.alerts.file import alerts_path
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk.failpoints import failpoint
from capd.store.disk.files import unlink
from capd.store.disk.layout import node_directory
from capd.store.documents.remote_state import RemoteState, read_remote_state
from capd.store.documents.zarr_json import run_attributes
from capd.store.keeps.file import keeps_path
from capd.store.objects.address import Address
from capd.store.objects.bucket import Bucket
from capd.store.segments.manifest import node_prefix
from capd.store.segments.series_table import DocumentObject, SeriesEntry, ShardObject
from capd.store.upload.checking import damage_in
from capd.store.upload.claim import UploadClaim
from capd.store.upload.local_files import KnownFiles
from capd.store.upload.moving import UploadedPart
from capd.store.upload.node_lines import NodeLines, read_node_lines
from capd.store.upload.plan import PlannedDocument, PlannedSeries, group_documents_of, shard_key
from capd.store.upload.publish import Publication, publish
from capd.store.upload.published_node import PublishedNode, fresh_state, load_state, read_remote, take_place
from capd.store.upload.record_segments import WrittenRecords, plan_segments, scratch_file, write_records
from capd.store.upload.round_plan import RoundPlan, plan_round, waiting_in
from capd.store.upload.sending.conditions import Conditions, probe
from capd.store.upload.sending.transfer import Transfer, UploadTools
from capd.store.upload.sending.unfinished import abort_unfinished
from capd.store.upload.snapshot import CatalogSnapshot, catalog_snapshot
from capd.store.upload.uploaded_rows import UploadedRows

__all__ = ["NodeUpload", "RoundResult", "versions_of"]

logger = logging.getLogger(__name__)

# A round publishes a manifest after so many bytes, so that readers of a long upload see something early.
ROUND_NBYTES = 2 << 30
# Superseded segments stay this long for readers that hold the manifest before.
_SUPERSEDED_S = 600.0
_STARTED_S = time.time()

Versions: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round did.

    Attributes:
        published: Whether there is a new manifest.
        objects: The objects that were written.
        nbytes: Their bytes.
        more: Whether the next round has more to do at once.
        is_complete: Whether the manifest holds everything of a quiet run.
    """

    published: bool = False
    objects: int = 0
    nbytes: int = 0
    more: bool = False
    is_complete: bool = False


class NodeUpload:
    """One node's part of a run, and where it goes. Use it in a `with` statement, or call `close`."""

    def __init__(
        self, run: Path, node: str, to: Address, tools: UploadTools, conditions: Conditions | None = None
    ) -> None:
        """Claim the upload of this part. No request is made.

        Args:
            run: The directory of the run.
            node: The name of the node.
            to: The address above the run's: it gets the name of the run.
            tools: What the uploads of a process share.
            conditions: What the store enforces; None to find out.

        Raises:
            StoreBusy: Another process uploads it.
            StoreError: There is no such part.
            CapdError: The extra `store` is not installed.
            OSError: The directory of the node cannot be used.
        """
        self.run, self.node = run, node
        self.address = to / run.name
        self.conditions = conditions
        self.tools = tools
        self._name = f"{run.name}/{node}"
        self._directory = node_directory(run, node)
        self._bucket, self._above = Bucket(self.address), Bucket(to)
        self._known = KnownFiles(self._directory)
        self._state: RemoteState | None = None
        self._remote: PublishedNode | None = None
        # Keys that may be there already, from an upload that ended in its middle.
        self._doubtful: set[str] = set()
        # The checksums of the groups' documents that were sent.
        self._groups: dict[str, int] = {}
        # Superseded segments, and since when.
        self._superseded: dict[str, float] = {}
        # What the last round saw; None if the next one must look at everything.
        self._seen: Versions | None = None
        self._is_complete = False
        if not (self._directory / CATALOG_NAME).exists():
            raise StoreError(
                f"{run} has no catalog of node {node}; start `capd serve` on the store to rebuild it"
            )
        self._claim = UploadClaim(self._directory)

    def __enter__(self) -> NodeUpload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process upload this part. Idempotent."""
        self._claim.release()

    def round(self) -> RoundResult:
        """Publish what changed since the last round.

        Raises:
            UploadStopped: The upload was asked to stop.
            RemovedRun: The run is being removed, or is gone.
            ObjectStoreError: The store does not answer or refuses, or another writer has this prefix.
            StoreError: The local store cannot be read.
            OSError: A local file cannot be read or written.
        """
        attributes = run_attributes(self.run)
        seen = versions_of(self.run, self.node)
        if self._remote is not None and seen == self._seen:
            self._delete_due()
            return RoundResult(is_complete=self._is_complete)
        try:
            result, is_late = self._round(attributes)
        except BaseException:
            # Nobody knows what was written before the failure.
            self._remote = None
            raise
        finally:
            unlink(scratch_file(self._directory), missing_ok=True)
        self._seen = None if result.more or is_late else seen
        self._is_complete = result.is_complete
        return result

    def _round(self, attributes: dict[str, Any]) -> tuple[RoundResult, bool]:
        """Return what was done, and whether only counters are left for a later manifest."""
        if self._remote is None:
            self._remote = self._contact()
        remote = self._remote
        lines = read_node_lines(self.run, self.node)
        # Readers keep a closing daemon from folding its catalog, so the snapshot ends before the transfers.
        with catalog_snapshot(self._directory) as snapshot:
            plan = self._plan(snapshot, remote, ROUND_NBYTES)
            is_new = remote.manifest is not None and lines.change(remote.manifest)
            if not plan.changes(remote, attributes) and not is_new:
                self.tools.figures.settled(self._name)
                return RoundResult(is_complete=plan.is_complete), plan.is_late(remote)
            self.tools.figures.waits(self._name, plan.nbytes, plan.oldest_s)
            records = self._write_records(plan, snapshot, remote)
        transfer = Transfer(
            self._bucket,
            self._name,
            self.tools,
            self._known,
            self._doubtful,
            partial(damage_in, self.run, self.node),
        )
        published = self._publish(plan, records, remote, attributes, lines, transfer)
        self._settle(published, remote)
        if not plan.more:
            self.tools.figures.settled(self._name)
        return RoundResult(True, transfer.objects, transfer.nbytes, plan.more, plan.is_complete), False

    def uploaded(self) -> UploadedPart | None:
        """Return what the last manifest describes, for the moving of its shards; None before the first round."""
        if self._remote is None or self._remote.manifest is None:
            return None
        return UploadedPart(self.run, self.node, self._bucket, list(self._remote.entries.values()))

    def pending(self) -> tuple[int, int]:
        """Return the number of shards that wait for their upload, and their bytes.

        It asks the object store for its manifest, and changes nothing.

        Raises:
            ObjectStoreError: The store does not answer, or another writer has this prefix.
            StoreError: The local store cannot be read.
        """
        self._state = read_remote_state(self._directory)
        if self._state is None or self._state.to != str(self.address):
            self._state = fresh_state(str(self.address))
        with catalog_snapshot(self._directory) as snapshot:
            remote = read_remote(
                self.run, self._bucket, self.node, self._state, snapshot.sessions, snapshot.series
            )
            plan = self._plan(snapshot, remote, None)
        shards = [shard for series in plan.series for shard in series.shards]
        return len(shards), sum(shard.version.nbytes for shard in shards)

    @property
    def seen(self) -> Versions | None:
        """What the last round saw of the run, as `versions_of` returns it; None if there is more to do."""
        return self._seen

    @property
    def is_done(self) -> bool:
        """Whether the run is complete in the object store, and nothing is left to be deleted there."""
        return self._is_complete and self._seen is not None and not self._superseded

    # Before the transfers

    def _contact(self) -> PublishedNode:
        """Ask the object store what it has, at first and after each failure."""
        with catalog_snapshot(self._directory) as snapshot:
            self._state = load_state(self._directory, str(self.address))
            self.tools.figures.waits(self._name, *waiting_in(self.run, snapshot, self._known, self._state))
        if self.conditions is None:
            self.conditions = probe(self._above)
            if self.conditions.problem:
                logger.warning("[upload] %s: %s", self._above.address, self.conditions.problem)
        remote = read_remote(
            self.run, self._bucket, self.node, self._state, snapshot.sessions, snapshot.series
        )
        if remote.manifest is None and self.conditions.creates:
            take_place(self._bucket, self.node, self._state)
        self._doubtful = {head.key for head in self._bucket.listing()}
        # Somebody may have removed the run there.
        self._groups = {key: crc32c for key, crc32c in self._groups.items() if key in self._doubtful}
        self._abort_unfinished(snapshot)
        written_s = 0.0 if remote.manifest is None else remote.manifest.written_ns / 1e9
        self._superseded = {name: self._superseded.get(name, written_s) for name in remote.leftovers}
        return remote

    def _abort_unfinished(self, snapshot: CatalogSnapshot) -> None:
        paths = {row.header.path for row in snapshot.series}
        own = f"{node_prefix(self.node)}/"

        def owns(key: str) -> bool:
            return key.startswith(own) or "/".join(key.split("/")[:5]) in paths

        try:
            aborted = abort_unfinished(self.address, owns, _STARTED_S)
        except CapdError as error:
            # A server that has no such list keeps its parts until its lifecycle rule.
            logger.debug("[upload] unfinished uploads of %s are not listed: %s", self.address, error)
            return
        if aborted:
            logger.info("[upload] aborted %d unfinished uploads of %s", aborted, self.address)
            failpoint("upload.after_abort")

    def _plan(self, snapshot: CatalogSnapshot, remote: PublishedNode, at_most: int | None) -> RoundPlan:
        assert self._state is not None  # noqa: S101 - read before
        return plan_round(self.run, snapshot, remote, self._known, self._state, at_most)

    def _write_records(
        self, plan: RoundPlan, snapshot: CatalogSnapshot, remote: PublishedNode
    ) -> WrittenRecords:
        segments = plan_segments(
            remote.records, remote.footers, plan.known, plan.rows, is_complete=plan.is_complete
        )
        return write_records(
            segments, snapshot, plan.known, remote.footers, plan.rows,
            UploadedRows(self._bucket, self.node, remote.entries), self._directory, remote.generation + 1,
            self.tools.halt,
        )  # fmt: skip

    # The transfers

    def _publish(
        self,
        plan: RoundPlan,
        records: WrittenRecords,
        remote: PublishedNode,
        attributes: dict[str, Any],
        lines: NodeLines,
        transfer: Transfer,
    ) -> PublishedNode:
        assert self._state is not None  # noqa: S101 - read before
        assert self.conditions is not None  # noqa: S101 - probed before
        failpoint("upload.before_shards")
        shards = _upload_shards(transfer, plan.series)
        failpoint("upload.after_shards")
        _upload_documents(transfer, plan.series)
        groups = group_documents_of(self.run, [one.row.header.path for one in plan.series], self._groups)
        transfer.each([partial(transfer.document, one) for one in groups])
        failpoint("upload.after_groups")
        self._groups |= {one.key: one.crc32c for one in groups}
        entries = []
        for one in plan.series:
            path = one.row.header.path
            documents = [DocumentObject(doc.name, len(doc.payload), doc.crc32c) for doc in one.documents]
            held = sorted((*one.kept, *shards.get(path, ())))
            entries.append(SeriesEntry(records.rows[path], records.parts[path], held, documents))
        for path, old in plan.entries.items():
            entries.append(SeriesEntry(records.rows[path], records.parts[path], old.shards, old.documents))
        entries.sort(key=lambda entry: entry.row.id)
        publication = Publication(
            self.run, self.node, attributes, entries, records, plan.sessions, plan.is_complete,
            remote.generation + 1, len(self._groups), lines,
        )  # fmt: skip
        return publish(
            publication, self._directory, self._state, self._bucket, remote, self.conditions, transfer
        )

    # After the transfers

    def _settle(self, published: PublishedNode, before: PublishedNode) -> None:
        """Note what is there now, and delete what the manifest before the last one named."""
        named = published.segments
        self._delete([name for name in self._superseded if name not in named])
        self._superseded = dict.fromkeys(sorted(before.segments - named), time.time())
        self._remote = published
        self._doubtful = set()
        self._known.keep(
            {
                shard_key(entry.row, shard.shard)
                for entry in published.entries.values()
                for shard in entry.shards
            }
        )
        self._known.save()

    def _delete_due(self) -> None:
        """Delete superseded segments for which no further manifest came for some minutes."""
        self._delete(
            [name for name, since_s in self._superseded.items() if time.time() - since_s > _SUPERSEDED_S]
        )

    def _delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        failpoint("upload.before_delete")
        try:
            self._bucket.delete([f"{node_prefix(self.node)}/{name}" for name in names])
        except ObjectStoreError as error:
            # They harm nobody. The next contact finds them again.
            logger.debug("[upload] superseded segments of %s stay: %s", self.address, error)
            return
        for name in names:
            self._superseded.pop(name, None)
        failpoint("upload.after_delete")


def _upload_shards(transfer: Transfer, series: Sequence[PlannedSeries]) -> dict[str, list[ShardObject]]:
    found: dict[str, list[ShardObject]] = {one.row.header.path: [] for one in series}

    def upload(planned: PlannedSeries, at: int) -> None:
        # Threads append in any order.
        found[planned.row.header.path].append(transfer.shard(planned.shards[at]))

    transfer.each([partial(upload, one, at) for one in series for at in range(len(one.shards))])
    return found


# The stages of the documents: each is complete before the next begins.
_STAGES: tuple[tuple[str, Callable[[PlannedDocument], bool]], ...] = (
    ("upload.after_moments", lambda one: one.name.startswith("moments/c/")),
    ("upload.after_lengths", lambda one: one.name == "moments/zarr.json"),
    ("upload.after_attributes", lambda one: one.name == "zarr.json"),
    ("upload.after_arrays", lambda one: one.name == "data/zarr.json"),
)


def _upload_documents(transfer: Transfer, series: Sequence[PlannedSeries]) -> None:
    for name, belongs in _STAGES:
        documents = [one for planned in series for one in planned.changed if belongs(one)]
        transfer.each([partial(transfer.document, one) for one in documents])
        failpoint(name)


def versions_of(run: Path, node: str) -> Versions:
    """Return what changes whenever something of a node's part of a run may have to go up."""
    catalog = node_directory(run, node) / CATALOG_NAME
    log = catalog.with_name(f"{CATALOG_NAME}-wal")
    places = run / "zarr.json", catalog, log, alerts_path(run, node), keeps_path(run, node)
    return tuple(map(_version, places))


def _version(place: Path) -> tuple[int, int, int]:
    try:
        found = place.stat()
    except FileNotFoundError:
        return (0, 0, 0)
    return found.st_size, found.st_mtime_ns, found.st_ino
