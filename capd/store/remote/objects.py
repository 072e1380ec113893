"""The objects of a run that the manifests name, and their files on this machine."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from capd.errors import ObjectStoreError
from capd.store.disk.files import make_directory, rename
from capd.store.format.frames import SeriesHeader
from capd.store.objects.bucket import Bucket
from capd.store.remote.node import RemoteNode, shard_key
from capd.store.segments.manifest import node_prefix
from capd.store.segments.series_table import SeriesEntry

__all__ = ["NamedObject", "download", "named_objects", "shard_object"]

_DOCUMENT = re.compile(r"zarr\.json|data/zarr\.json|moments/(zarr\.json|c(/(0|[1-9][0-9]{0,17})){2})")
# Of documents whose size no manifest names.
_MAX_DOCUMENT_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class NamedObject:
    """An object that a manifest names.

    Attributes:
        key: Its key below the run.
        nbytes: Its size; None for the documents of groups.
        crc32c: The checksum of its bytes; None for the documents of groups.
        node: The node that wrote it; "" for the documents of groups.
        series: The path of its series; "" for other objects.
        shard: The number of its shard; None for other objects.
    """

    key: str
    nbytes: int | None
    crc32c: int | None
    node: str = ""
    series: str = ""
    shard: int | None = None

    @property
    def at_most(self) -> int:
        """The most bytes that are read of it."""
        return _MAX_DOCUMENT_NBYTES if self.nbytes is None else self.nbytes


def named_objects(nodes: Iterable[RemoteNode]) -> Iterator[NamedObject]:
    """Yield the objects of a run: documents of groups, then of each series, then its shards. Segments come last.

    Raises:
        ObjectStoreError: A series segment cannot be read, or names an object that no run has.
    """
    nodes = list(nodes)
    groups = {PurePosixPath("zarr.json"): None}
    for node in nodes:
        for path in node.entries:
            groups |= dict.fromkeys(above / "zarr.json" for above in PurePosixPath(path).parents)
    yield from (NamedObject(str(group), None, None) for group in sorted(groups))
    for node in nodes:
        for entry in node.entries.values():
            yield from _of_series(node, entry)
    for node in nodes:
        for segment in node.manifest.segments:
            key = f"{node_prefix(node.name)}/{segment.name}"
            yield NamedObject(key, segment.nbytes, segment.crc32c, node.name)


def _of_series(node: RemoteNode, entry: SeriesEntry) -> Iterator[NamedObject]:
    path = entry.row.header.path
    for document in entry.documents:
        if not _DOCUMENT.fullmatch(document.name):
            raise ObjectStoreError(f"{node.directory} names {path}/{document.name}, which no series has")
        yield NamedObject(f"{path}/{document.name}", document.nbytes, document.crc32c, node.name, path)
    for shard in entry.shards:
        key = shard_key(entry.row.header, shard.shard)
        yield NamedObject(key, shard.nbytes, shard.crc32c, node.name, path, shard.shard)


def shard_object(nodes: Iterable[RemoteNode], header: SeriesHeader, shard: int) -> NamedObject | None:
    """Return a shard that a manifest names; None if none does."""
    for node in nodes:
        entry = node.entries.get(header.path)
        for known in entry.shards if entry is not None else ():
            if known.shard == shard:
                return NamedObject(
                    shard_key(header, shard), known.nbytes, known.crc32c, node.name, header.path, shard
                )
    return None


def download(bucket: Bucket, one: NamedObject, run: Path) -> str:
    """Write an object into its file of a run, whole or not at all.

    Returns:
        How it differs from what the manifest says; "" if it does not. The file has what the object has.

    Raises:
        FileNotFoundError: There is no such object.
        ObjectStoreError: It cannot be read.
        OSError: The file cannot be written.
    """
    target = run / one.key
    make_directory(target.parent)
    # An object that was replaced may be larger than the manifest says.
    limit = max(2 * one.at_most, _MAX_DOCUMENT_NBYTES)
    descriptor, temporary = tempfile.mkstemp(prefix=".capd-", suffix=".copying", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            crc = bucket.get_into(one.key, file, at_most=limit)
            nbytes = file.tell()
        rename(Path(temporary), target)
    except BaseException:
        os.unlink(temporary)
        raise
    if one.nbytes is not None and nbytes != one.nbytes:
        return f"it has {nbytes} bytes, and {one.nbytes} in the manifest"
    if one.crc32c is not None and crc != one.crc32c:
        return "it does not match the checksum in the manifest"
    return ""
