"""What of a run is nowhere but on this disk: its catalogs compared with the manifests of its upload."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from capd.errors import CapdError, ObjectStoreError
from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.catalog.totals import Held, sums_in
from capd.store.disk.layout import node_directory, nodes_of
from capd.store.documents.remote_state import RemoteState, read_remote_state
from capd.store.objects.address import parse_address
from capd.store.objects.bucket import Bucket
from capd.store.segments.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Manifest,
    decode_manifest,
    node_prefix,
)
from capd.store.upload.node_lines import read_node_lines
from capd.store.verify.remote import verify_remote
from capd_client.process.text import human_nbytes

__all__ = ["Unsynced", "unsynced", "uploaded_to"]


@dataclass(frozen=True, slots=True)
class Unsynced:
    """The part of a node that no object store is known to have.

    Attributes:
        node: The name of the node.
        to: Where the run is uploaded to; "" if it is not.
        records: The records that are missing there.
        nbytes: Their raw bytes.
        why: Why the number is not sure; "" if it is.
    """

    node: str
    to: str
    records: int
    nbytes: int
    why: str = ""

    def __str__(self) -> str:
        what = f"{self.records:,} records ({human_nbytes(self.nbytes)})"
        if not self.to:
            return f"{what} of node {self.node} were never uploaded"
        if self.why and not self.records:
            return f"of node {self.node}, {self.why}"
        if self.why:
            return f"{what} of node {self.node} may be nowhere else: {self.why}"
        return f"{what} of node {self.node} are not at {self.to}"


def uploaded_to(run: Path) -> str:
    """Return the address that a run is uploaded to, as its local state says; "" if it is not."""
    for node in nodes_of(run):
        with contextlib.suppress(CapdError, OSError):
            state = read_remote_state(node_directory(run, node))
            if state is not None:
                return state.to
    return ""


def unsynced(run: Path) -> list[Unsynced]:
    """Return the parts of a run that are not wholly uploaded.

    It asks the object store for each node's manifest, and then lists the objects: a manifest says nothing of those that
    were deleted since.

    Raises:
        CapdError: A catalog cannot be read.
        OSError: A catalog cannot be read.
    """
    nodes = nodes_of(run)
    found = [one for node in nodes if (one := _unsynced_of(run, node)) is not None]
    return found or [one for node in nodes if (one := _damaged_of(run, node)) is not None]


def _unsynced_of(run: Path, node: str) -> Unsynced | None:
    directory = node_directory(run, node)
    held = _local(directory)
    records, raw = held.records, held.raw_bytes
    if not held.rows:
        return None
    state = read_remote_state(directory)
    if state is None:
        return Unsynced(node, "", records, raw)
    try:
        manifest = _manifest_of(state, node)
    except CapdError as error:
        return Unsynced(node, state.to, records, raw, str(error))
    if manifest is None:
        return Unsynced(node, state.to, records, raw)
    # A manifest that is complete has one segment, whose rows are the records of the run, and the errors of formats.
    there = sum(segment.rows for segment in manifest.records) - manifest.error_records
    is_sealed = not any((directory / "spool").glob("*"))
    uploaded = Held(
        there,
        error_records=manifest.error_records,
        raw_bytes=manifest.raw_bytes,
        stored_bytes=manifest.stored_bytes,
    )
    if manifest.is_complete and is_sealed and uploaded == held:
        if not read_node_lines(run, node).change(manifest):
            return None
        return Unsynced(node, state.to, 0, 0, f"the newest alerts or keeps are not at {state.to}")
    missing, nbytes = max(0, records - there), max(0, raw - manifest.raw_bytes)
    why = "" if missing else f"the upload to {state.to} is not complete"
    return Unsynced(node, state.to, missing, nbytes, why)


def _damaged_of(run: Path, node: str) -> Unsynced | None:
    """Return a part whose manifest is complete, but names objects that are not there."""
    directory = node_directory(run, node)
    held = _local(directory)
    records, raw = held.records, held.raw_bytes
    state = read_remote_state(directory)
    if not held.rows or state is None:
        return None
    try:
        report = verify_remote(parse_address(state.to), listing=True)
    except CapdError as error:
        return Unsynced(node, state.to, records, raw, str(error))
    # Other machines may still upload their nodes.
    found = [one for one in report.damaged if one.node in ("", node)]
    if not found:
        return None
    what = f"{found[0].file}: {found[0].what}"
    if len(found) > 1:
        what += f", and {len(found) - 1} more of the kind; `capd verify {state.to} --listing` lists them"
    return Unsynced(node, state.to, records, raw, what)


def _local(directory: Path) -> Held:
    """Return the totals of a node; zeros without a catalog."""
    catalog = directory / CATALOG_NAME
    if not catalog.is_file():
        return Held()
    with contextlib.closing(connect_read_only(catalog)) as database:
        try:
            return sums_in(database)
        except sqlite3.DatabaseError as error:
            raise ObjectStoreError(f"the catalog {catalog} is damaged: {error}") from error


def _manifest_of(state: RemoteState, node: str) -> Manifest | None:
    """Return the last manifest of a node; None if there is none.

    Raises:
        CapdError: The object store does not answer, or another store wrote the manifest.
    """
    bucket, key = Bucket(parse_address(state.to)), f"{node_prefix(node)}/{MANIFEST_NAME}"
    try:
        payload, _ = bucket.get_versioned(key, at_most=MAX_MANIFEST_NBYTES)
    except FileNotFoundError:
        return None
    found = decode_manifest(payload, bucket.address / key)
    if found.origin != state.origin:
        raise ObjectStoreError(f"{bucket.address / key} is of another store", reason="conflict")
    return found
