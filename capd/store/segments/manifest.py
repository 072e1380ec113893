"""The manifest of one node's part of a run in an object store: the last object of an upload, and the first of a reader.

    <run>.zarr/.capd/node=<node>/manifest.json
    <run>.zarr/.capd/node=<node>/series-<generation>.parquet     one row per series
    <run>.zarr/.capd/node=<node>/records-<generation>.parquet    one row per record
    <run>.zarr/.capd/node=<node>/alerts-<generation>.jsonl       one line per alert, if there are any
    <run>.zarr/.capd/node=<node>/keeps-<generation>.jsonl        one line per keep of the recorder, if there are any

A manifest names the segments that are valid. It is the only object besides documents that is ever replaced, and only
by its one writer. Segments that no manifest names are leftovers. Its last member is the crc32c of all bytes before it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from capd.errors import NotAStore, ObjectStoreError
from capd.store.catalog.rows import SessionRow
from capd.store.documents.json_document import MAX_LENGTH, is_shallow
from capd.store.format.codecs import crc32c
from capd.store.format.frames import FORMAT_VERSION

__all__ = [
    "MANIFEST_FORMAT",
    "MANIFEST_NAME",
    "MAX_MANIFEST_NBYTES",
    "Manifest",
    "Segment",
    "decode_manifest",
    "encode_manifest",
    "generation_of",
    "is_segment",
    "lines_change",
    "node_prefix",
    "segment_name",
]  # fmt: skip

MANIFEST_FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_NBYTES = 64 << 20

_NAME = re.compile(r"(?:(?:series|records)-(\d{8})\.parquet|(?:alerts|keeps)-(\d{8})\.jsonl)", re.ASCII)
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
Crc = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Segment(msgspec.Struct, frozen=True):
    """An object with rows: of alerts and keeps their lines, of others a Parquet table. rows: their number."""

    name: str
    nbytes: Count
    crc32c: Crc
    rows: Count


class Manifest(msgspec.Struct, kw_only=True):
    """What a node has uploaded of a run.

    Attributes:
        format: MANIFEST_FORMAT.
        capd: The version of capd that wrote it.
        run_id: The id of the run.
        node: The name of the node.
        origin: A random text that the local store of the node keeps. It tells two stores of one node name apart.
        generation: The number of this manifest, from 1.
        written_ns: The time, as nanoseconds since 1970.
        is_complete: Whether it holds everything: the run was quiet and sealed.
        attributes: The `capd` attributes of the run: its format, tags and marks.
        series: The segment with all series.
        records: The segments with all records, in order.
        sessions: The counters of the ranks, in the order of the catalog.
        raw_bytes: The sum over the series, without those with errors of formats.
        stored_bytes: The sum over the series.
        error_records: The errors of formats among the rows of the segments.
        first_iteration: The first iteration of its records; None without records.
        last_iteration: The last iteration of its records.
        quant_types: The quant types of its tensors, in order.
        objects: The number of objects of the node, but for the segments and this one.
        object_bytes: The bytes of these objects.
        alerts: The segment with all alerts; None without any.
        keeps: The segment with all keeps of the flight recorder; None without any.
    """

    format: int = MANIFEST_FORMAT
    capd: str
    run_id: str
    node: str
    origin: str
    generation: Count
    written_ns: Count
    is_complete: bool
    attributes: dict[str, Any]
    series: Segment
    records: list[Segment]
    sessions: list[SessionRow]
    raw_bytes: Count
    stored_bytes: Count
    first_iteration: int | None
    last_iteration: int | None
    quant_types: list[str]
    objects: Count
    object_bytes: Count
    alerts: Segment | None = None
    error_records: Count = 0
    keeps: Segment | None = None

    @property
    def segments(self) -> list[Segment]:
        """All segments that it names."""
        return [
            self.series, *self.records, *(one for one in (self.alerts, self.keeps) if one is not None)
        ]  # fmt: skip


def node_prefix(node: str) -> str:
    """Return the directory of a node's manifest and segments, below the run."""
    return f".capd/node={node}"


def segment_name(kind: str, generation: int) -> str:
    """Return the name of a segment. kind: "series", "records", "alerts" or "keeps"."""
    return f"{kind}-{generation:08d}.{'jsonl' if kind in ('alerts', 'keeps') else 'parquet'}"


def is_segment(name: str) -> bool:
    """Return whether an object of a node has the name of a segment."""
    return _NAME.fullmatch(name) is not None


def generation_of(name: str) -> int:
    """Return the generation in the name of a segment; 0 for another name."""
    found = _NAME.fullmatch(name)
    return 0 if found is None else int(found[1] or found[2])


_SUM = re.compile(rb',\n "crc32c": (\d{1,10})\n}\Z')
_encode = msgspec.json.Encoder(enc_hook=None).encode
_decode = msgspec.json.Decoder(Manifest).decode


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the JSON of a manifest, with its checksum."""
    head = msgspec.json.format(_encode(manifest), indent=1).removesuffix(b"\n}")
    return head + b',\n "crc32c": %d\n}' % crc32c(head)


def decode_manifest(payload: bytes, place: object) -> Manifest:
    """Return the manifest in an object that may come from anybody.

    Args:
        payload: The bytes of the object.
        place: Where it is, for the message.

    Raises:
        NotAStore: A newer capd wrote it.
        ObjectStoreError: It is not a manifest.
    """
    try:
        plain = msgspec.json.decode(payload)
        version = plain.get("format") if isinstance(plain, dict) else None
        if type(version) is int and version > MANIFEST_FORMAT:
            raise NotAStore(
                f"{place} has manifest format {version}, but this capd reads up to {MANIFEST_FORMAT}; upgrade capd"
            )
        found = _decode(payload)
        last = _SUM.search(payload)
        if last is None or crc32c(payload[: last.start()]) != int(last[1]):
            raise ValueError("it fails its checksum")
        if not is_shallow(plain):
            raise ValueError("it is nested too deeply")
        for segment in found.segments:
            if not is_segment(segment.name):
                raise ValueError(f"{segment.name!r} is no name of a segment")
        written = found.attributes.get("format")
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ObjectStoreError(f"{place} is no manifest of capd: {error}") from error
    if type(written) is int and written > FORMAT_VERSION:
        raise NotAStore(
            f"{place}: the run has format {written}, but this capd reads up to {FORMAT_VERSION}; upgrade capd"
        )
    return found


def lines_change(last: Segment | None, payload: bytes) -> bool:
    """Return whether the lines of a file are other ones than those of a segment. A lost file takes none away."""
    held = None if last is None else (last.nbytes, last.crc32c)
    return bool(payload) and held != (len(payload), crc32c(payload))
