"""What the object store has of one node's part of a run: its manifest, its series segment, and who wrote them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from capd.errors import ObjectStoreError, StoreError
from capd.store.catalog.rows import SeriesRow, SessionRow
from capd.store.disk.failpoints import failpoint
from capd.store.disk.layout import series_on_disk, shard_path
from capd.store.disk.run_document import write_durably
from capd.store.documents.remote_state import (
    REMOTE_STATE_NAME,
    RemoteState,
    encode_remote_state,
    new_origin,
    read_remote_state,
)
from capd.store.format.codecs import crc32c
from capd.store.objects.bucket import Bucket
from capd.store.scan.moved_shard import MovedShard, moved_shard
from capd.store.scan.survey import moved_shards
from capd.store.segments.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    Segment,
    decode_manifest,
    generation_of,
    is_segment,
    node_prefix,
)
from capd.store.segments.series_table import SeriesEntry, read_series_table
from capd.store.upload.local_files import OpenShard

__all__ = [
    "AnotherWriter",
    "PublishedNode",
    "check_moved_to",
    "fresh_state",
    "load_state",
    "read_remote",
    "save_state",
    "take_place",
]

# A bucket may be anybody's. A million series take a tenth of it.
_MAX_TABLE_NBYTES = 1 << 30
_MAX_ORIGIN_NBYTES = 1 << 10


class AnotherWriter(ObjectStoreError):
    """Another daemon or another store writes this node's prefix. Names the remedy."""

    exit_code: ClassVar[int] = 7

    def __init__(self, bucket: Bucket, node: str, why: str) -> None:
        super().__init__(
            f"{bucket.address / node_prefix(node)} has another writer ({why}); set another `node` or another "
            "address to upload to, or remove what is there",
            reason="conflict",
        )


@dataclass(slots=True)
class PublishedNode:
    """The last published state. entries: by series path. leftovers: objects beside the manifest that it does not name.

    Attributes:
        manifest: The manifest; None if there is none.
        etag: Its entity tag.
        entries: The series by path.
        footers: The footers of the record segments by generation.
        leftovers: The names of the segments that the manifest does not name.
        generation: The largest number of the manifest and of all segments.
    """

    manifest: Manifest | None = None
    etag: str | None = None
    entries: dict[str, SeriesEntry] = field(default_factory=dict)
    footers: dict[int, bytes] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    generation: int = 0

    @property
    def segments(self) -> set[str]:
        """The names of all segments that the manifest names."""
        return set() if self.manifest is None else {one.name for one in self.manifest.segments}

    @property
    def records(self) -> list[Segment]:
        """The record segments that the manifest names."""
        return [] if self.manifest is None else self.manifest.records


def load_state(directory: Path, to: str) -> RemoteState:
    """Return the state of an upload to an address, which is durable before the first object.

    Raises:
        StoreError: Shards were moved to another address.
        NotAStore: The state cannot be read.
        OSError: It cannot be read or written.
    """
    state = read_remote_state(directory)
    if state is not None and state.to == to:
        return state
    if state is not None:
        _check_moved(directory.parent.parent, to)
    fresh = fresh_state(to)
    save_state(directory, fresh)
    return fresh


def _check_moved(run: Path, to: str) -> None:
    """Check that no shard of a run is at another address. Its bytes would have to come from there."""
    for path in series_on_disk(run):
        for moved in moved_shards(run, path).values():
            check_moved_to(run, moved, to)


def check_moved_to(run: Path, moved: MovedShard, to: str) -> None:
    """Check that a shard was moved to an address.

    Raises:
        StoreError: It was moved to another one.
    """
    if str(moved.to) != to:
        raise StoreError(
            f"some shards of {run} are only in {moved.to}; upload it there, or copy the run with `capd cp` first"
        )


def fresh_state(to: str) -> RemoteState:
    """Return the state of an upload that begins."""
    return RemoteState(to=to, origin=new_origin())


def save_state(directory: Path, state: RemoteState) -> None:
    """Write a state atomically and durably. Raises OSError."""
    failpoint("upload.before_state")
    write_durably(
        directory / REMOTE_STATE_NAME, encode_remote_state(state), directory / f"{REMOTE_STATE_NAME}.tmp"
    )
    failpoint("upload.after_state")


def read_remote(
    run: Path,
    bucket: Bucket,
    node: str,
    state: RemoteState,
    sessions: Collection[SessionRow],
    rows: Collection[SeriesRow],
) -> PublishedNode:
    """Return what the object store has of a node.

    Args:
        run: The directory of the run.
        bucket: The place of the run.
        node: The name of the node.
        state: The local state.
        sessions: The local sessions.
        rows: The local series.

    Raises:
        AnotherWriter: It is of another writer.
        ObjectStoreError: It cannot be read.
    """
    prefix = node_prefix(node)
    try:
        payload, etag = bucket.get_versioned(f"{prefix}/{MANIFEST_NAME}", at_most=MAX_MANIFEST_NBYTES)
    except FileNotFoundError:
        found = PublishedNode()
    else:
        place = bucket.address / prefix / MANIFEST_NAME
        manifest = decode_manifest(payload, place)
        table = bucket.get(
            f"{prefix}/{manifest.series.name}", at_most=min(manifest.series.nbytes, _MAX_TABLE_NBYTES)
        )
        if crc32c(table) != manifest.series.crc32c:
            raise ObjectStoreError(f"{bucket.address / prefix / manifest.series.name} fails its checksum")
        entries, footers = read_series_table(table, bucket.address / prefix / manifest.series.name)
        found = PublishedNode(manifest, etag, {one.row.header.path: one for one in entries}, footers)
        _check_writer(run, bucket, node, state, found, sessions, {row.header.path: row for row in rows})
    _, objects = bucket.names(f"{prefix}/")
    names = {one.key.rpartition("/")[2] for one in objects}
    if found.manifest is not None:
        found.generation = found.manifest.generation
    segments = set(filter(is_segment, names))
    found.leftovers = sorted(segments - found.segments)
    found.generation = max([found.generation, *map(generation_of, segments)])
    return found


def take_place(bucket: Bucket, node: str, state: RemoteState) -> None:
    """Take the place of a node before its first object, so that of two stores that begin at once only one goes on.

    Raises:
        AnotherWriter: Another store took it first.
        ObjectStoreError: The object store does not answer or refuses.
    """
    key, origin = f".capd/origin-{node}", state.origin.encode()
    try:
        bucket.put(key, origin, condition="create")
    except ObjectStoreError as error:
        if error.reason != "conflict":
            raise
        if bucket.get(key, at_most=_MAX_ORIGIN_NBYTES) != origin:
            raise AnotherWriter(bucket, node, f"another store began first, as {key} says") from error


def _check_writer(
    run: Path,
    bucket: Bucket,
    node: str,
    state: RemoteState,
    found: PublishedNode,
    sessions: Collection[SessionRow],
    rows: Mapping[str, SeriesRow],
) -> None:
    manifest = found.manifest
    assert manifest is not None  # noqa: S101 - the caller has it
    if manifest.origin == state.origin:
        return
    if state.generation:
        raise AnotherWriter(bucket, node, f"its manifest {manifest.generation} is of another store")
    # A store that lost its state, or was copied here, goes on with what is there.
    if not {one.client for one in manifest.sessions} <= {one.client for one in sessions}:
        raise AnotherWriter(bucket, node, "it has sessions that this store does not know")
    for path, entry in found.entries.items():
        is_known = path in rows and rows[path].records >= entry.row.records
        # Imported runs have no sessions that tell whose they are.
        if not is_known or not (manifest.sessions or _is_same(run, entry)):
            raise AnotherWriter(bucket, node, f"it has records of {path} that this store does not know")


def _is_same(run: Path, entry: SeriesEntry) -> bool:
    """Return whether the uploaded shards of a series are the local ones, by their sizes and the first checksum."""
    for shard in entry.shards:
        path = shard_path(run, entry.row.header, shard.shard)
        try:
            if (moved := moved_shard(run, path)) is not None:
                if (moved.nbytes, moved.crc32c) != (shard.nbytes, shard.crc32c):
                    return False
                continue
            with OpenShard(path) as file:
                if file.version.nbytes != shard.nbytes:
                    return False
                if shard is entry.shards[0] and file.crc32c() != shard.crc32c:
                    return False
        except (OSError, StoreError):
            return False
    return True
