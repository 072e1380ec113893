"""The end of a round: segments of records, series, alerts and keeps, then the manifest, which makes all visible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capd._version import __version__
from capd.errors import ObjectStoreError
from capd.store.catalog.rows import SessionRow
from capd.store.catalog.totals import held_by
from capd.store.disk.failpoints import failpoint
from capd.store.documents.remote_state import RemoteState
from capd.store.format.codecs import crc32c
from capd.store.objects.bucket import Bucket
from capd.store.segments.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    Segment,
    decode_manifest,
    encode_manifest,
    lines_change,
    node_prefix,
    segment_name,
)
from capd.store.segments.record_table import iterations_of
from capd.store.segments.series_table import SeriesEntry, quant_types_of, write_series_table
from capd.store.upload.local_files import OpenShard
from capd.store.upload.node_lines import NodeLines
from capd.store.upload.published_node import AnotherWriter, PublishedNode, save_state
from capd.store.upload.record_segments import WrittenRecords
from capd.store.upload.sending.conditions import Conditions
from capd.store.upload.sending.transfer import Transfer

__all__ = ["Publication", "publish"]


@dataclass(frozen=True, slots=True)
class Publication:
    """What a manifest is about. groups: the number of the documents of groups."""

    run: Path
    node: str
    attributes: dict[str, Any]
    entries: Sequence[SeriesEntry]
    records: WrittenRecords
    sessions: list[SessionRow]
    is_complete: bool
    generation: int
    groups: int
    lines: NodeLines


def publish(
    what: Publication,
    directory: Path,
    state: RemoteState,
    bucket: Bucket,
    before: PublishedNode,
    conditions: Conditions,
    transfer: Transfer,
) -> PublishedNode:
    """Upload the segments and the manifest. All other objects are there.

    Raises:
        AnotherWriter: Somebody else wrote a manifest or segments in the meantime.
        ObjectStoreError: They cannot be written.
        OSError: The local state cannot be written.
    """
    prefix = node_prefix(what.node)
    if what.records.file is not None:
        failpoint("upload.before_records")
        name = f"{prefix}/{what.records.segments[-1].name}"
        with OpenShard(what.records.file) as file:
            transfer.put_file(name, file, what.records.segments[-1].crc32c)
        failpoint("upload.after_records")
    entries = {entry.row.header.path: entry for entry in what.entries}
    if before.manifest is not None and entries == before.entries:
        # Only counters or marks changed.
        series = before.manifest.series
    else:
        series = _put_series(what, bucket, conditions, transfer)
    failpoint("upload.after_series")
    last = before.manifest
    alerts = _put_lines(
        "alerts", what, what.lines.alerts, None if last is None else last.alerts, bucket, conditions, transfer
    )
    keeps = _put_lines(
        "keeps", what, what.lines.keeps, None if last is None else last.keeps, bucket, conditions, transfer
    )
    manifest = _manifest(what, state, series, alerts, keeps)
    payload = encode_manifest(manifest)
    etag = _put_manifest(what, state, bucket, before, conditions, transfer, payload)
    failpoint("upload.after_manifest")
    state.generation, state.etag = manifest.generation, etag
    save_state(directory, state)
    return PublishedNode(
        manifest,
        etag,
        entries,
        dict(what.records.footers),
        [],
        what.generation,
    )


def _put_series(what: Publication, bucket: Bucket, conditions: Conditions, transfer: Transfer) -> Segment:
    table = write_series_table(what.entries, what.records.footers)
    series = Segment(segment_name("series", what.generation), len(table), crc32c(table), len(what.entries))
    _put_segment(series, table, what.node, bucket, conditions, transfer)
    return series


def _put_lines(
    kind: str,
    what: Publication,
    payload: bytes,
    last: Segment | None,
    bucket: Bucket,
    conditions: Conditions,
    transfer: Transfer,
) -> Segment | None:
    """Upload the lines of a file if they are other ones than before. A lost file takes none away."""
    if not lines_change(last, payload):
        return last
    segment = Segment(
        segment_name(kind, what.generation), len(payload), crc32c(payload), payload.count(b"\n")
    )
    _put_segment(segment, payload, what.node, bucket, conditions, transfer)
    return segment


def _put_segment(
    segment: Segment, payload: bytes, node: str, bucket: Bucket, conditions: Conditions, transfer: Transfer
) -> None:
    key = f"{node_prefix(node)}/{segment.name}"
    try:
        transfer.put(key, payload, segment.crc32c, "create" if conditions.creates else None)
    except ObjectStoreError as error:
        if error.reason != "conflict":
            raise
        if not _is_own(bucket, key, segment):
            raise AnotherWriter(bucket, node, f"{segment.name} was written in the meantime") from error


def _manifest(
    what: Publication, state: RemoteState, series: Segment, alerts: Segment | None, keeps: Segment | None
) -> Manifest:
    objects = [*(shard.nbytes for entry in what.entries for shard in entry.shards),
               *(one.nbytes for entry in what.entries for one in entry.documents)]  # fmt: skip
    span = iterations_of(what.records.footers.values())
    held = held_by(entry.row for entry in what.entries)
    return Manifest(
        capd=__version__,
        run_id=str(what.attributes.get("run_id", what.run.stem)),
        node=what.node,
        origin=state.origin,
        generation=what.generation,
        written_ns=time.time_ns(),
        is_complete=what.is_complete,
        attributes=what.attributes,
        series=series,
        records=what.records.segments,
        sessions=what.sessions,
        raw_bytes=held.raw_bytes,
        stored_bytes=held.stored_bytes,
        error_records=held.error_records,
        first_iteration=None if span is None else span[0],
        last_iteration=None if span is None else span[1],
        quant_types=quant_types_of(what.entries),
        objects=len(objects) + what.groups,
        object_bytes=sum(objects),
        alerts=alerts,
        keeps=keeps,
    )


def _put_manifest(
    what: Publication,
    state: RemoteState,
    bucket: Bucket,
    before: PublishedNode,
    conditions: Conditions,
    transfer: Transfer,
    payload: bytes,
) -> str | None:
    """Write the manifest over the last one, and over no other. Return its entity tag."""
    key = f"{node_prefix(what.node)}/{MANIFEST_NAME}"
    condition: str | None = None
    if before.manifest is None:
        condition = "create" if conditions.creates else None
    elif conditions.matches:
        condition = before.etag
    if condition is None:
        _check_unchanged(what, bucket, before, key)
    failpoint("upload.before_manifest")
    try:
        return transfer.put(key, payload, crc32c(payload), condition)
    except ObjectStoreError as error:
        if error.reason != "conflict":
            raise
        found, etag = bucket.get_versioned(key, at_most=MAX_MANIFEST_NBYTES)
        if found == payload:
            # The answer to the first try was lost.
            return etag
        other = decode_manifest(found, bucket.address / key)
        raise AnotherWriter(
            bucket, what.node, f"its manifest {other.generation} was written in the meantime"
        ) from error


def _check_unchanged(what: Publication, bucket: Bucket, before: PublishedNode, key: str) -> None:
    """Compare the manifest with the last one, where the store does not do so itself.

    Two writers at the same moment are not noticed until the next round.
    """
    try:
        payload, _ = bucket.get_versioned(key, at_most=MAX_MANIFEST_NBYTES)
    except FileNotFoundError:
        return
    found = decode_manifest(payload, bucket.address / key)
    last = before.manifest
    if last is None or (found.origin, found.generation) != (last.origin, last.generation):
        raise AnotherWriter(bucket, what.node, f"its manifest {found.generation} was written in the meantime")


def _is_own(bucket: Bucket, key: str, segment: Segment) -> bool:
    """Return whether an object has the bytes of this segment: the answer to its first try was lost."""
    head = bucket.head(key)
    return head is not None and (head.nbytes, head.crc32c) == (segment.nbytes, segment.crc32c)
