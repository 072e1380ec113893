"""The frames of a shard file and of the node's small log: each file is its own journal. Format version 1.

A shard is `[HEADER] ([CHUNK])* [COMMIT] … [index][crc32c]`. The Zarr v3 sharding index follows the last frame. Index
entries are absolute offsets, so Zarr readers skip the frames as gaps. A small log is
`[HEADER] ([SERIES] [RECORD] [COMMIT])*` and never becomes a Zarr file.

Frame header, 48 bytes, little-endian (struct `<4sBBHIIQQQII`):

  magic "CPDF", version u8 = 1, kind u8, 2 zero bytes, payload bytes u32, ordinal u32, session u64, sequence u64,
  raw bytes u64, payload crc32c u32, crc32c of the preceding 44 bytes u32

  kind     payload                                  ordinal
  HEADER   msgpack FileHeader                       0
  CHUNK    encoded inner chunk (ends in its crc)    chunk within the record (or batch)
  COMMIT   msgpack Commit                           series reference in a small log, else 0
  SERIES   msgpack SeriesHeader                     series reference, valid in this file
  RECORD   a small record's raw bytes               series reference

`session` is the first 8 bytes of the client uuid. `sequence` is the client's sequence number. A record exists once its
COMMIT frame is complete. Frames after the last COMMIT remain from an interrupted write. The payload crc of a CHUNK is
the crc32c at the end of its payload, which covers the rest of it. For the other kinds it covers the whole payload.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Container, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, Optional, Union

import msgspec

from capd.errors import NotAStore, StoreError
from capd.store.format.codecs import crc32c
from capd.store.format.geometry import Geometry
from capd_client.protocol.key import MAX_INDEX, Key, Moment

__all__ = [
    "FORMAT_VERSION", "FRAME_NBYTES", "MAX_PAYLOAD_NBYTES", "UNKNOWN_CLIENT", "UNKNOWN_MOMENT", "Commit",
    "CommitHeads", "FileHeader", "Frame", "FrameKind", "RecordHead", "RecordRow", "SeriesHeader", "StatsRow",
    "decode_commit", "decode_head", "decode_heads", "decode_payload", "decode_row", "encode_commit", "encode_row",
    "frame", "frame_header", "parse_frame", "payload_is_sound", "read_frame", "session_of", "sound_end", "walk",
]  # fmt: skip

FORMAT_VERSION = 1
FRAME_NBYTES = 48
MAX_PAYLOAD_NBYTES = 64 << 20
# The client of a record whose COMMIT is lost.
UNKNOWN_CLIENT = bytes(16)
# The moment of a record whose published columns are lost, too.
UNKNOWN_MOMENT = Moment(MAX_INDEX)
_MAGIC = b"CPDF"
_HEADER = struct.Struct("<4sBBHIIQQQII")
# The header without its own checksum.
_HEAD = struct.Struct("<4sBBHIIQQQI")
_CRC = struct.Struct("<I")


class FrameKind(IntEnum):
    """The kind of a frame, which determines its payload."""

    HEADER = 1
    CHUNK = 2
    COMMIT = 3
    SERIES = 4
    RECORD = 5


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """A frame's header and the place of its payload in the file.

    Attributes:
        kind: The kind of the payload.
        nbytes: The bytes of the payload.
        ordinal: The chunk within the record, or the series reference (see the module docstring).
        session: The first 8 bytes of the client uuid.
        sequence: The client's sequence number.
        raw_nbytes: The bytes of the payload before encoding.
        crc: The payload's checksum.
        offset: The offset of the payload in the file.
    """

    kind: FrameKind
    nbytes: int
    ordinal: int
    session: int
    sequence: int
    raw_nbytes: int
    crc: int
    offset: int


Number = Union[int, float]


class StatsRow(msgspec.Struct, array_like=True, gc=False):
    """The statistics of one record, which are additive (see `capd.store.format.statistics`).

    Attributes:
        exponents: The sparse exponent histogram [bin, count, …].
        sum_cube, sum_fourth: 0 in rows of version 1, which lacked them.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    min: Optional[Number] = None
    max: Optional[Number] = None
    absmax: Optional[Number] = None
    sum: float = 0.0
    sum_sq: float = 0.0
    exponents: list[int] = []
    sum_cube: float = 0.0
    sum_fourth: float = 0.0


class RecordHead(msgspec.Struct, array_like=True, gc=False):
    """The identity and the shape of a record. Decoding it from the bytes of a RecordRow skips the other fields."""

    client: bytes
    sequence: int
    shape: tuple[int, ...]
    nbytes: int
    moment: Moment

    @property
    def capture(self) -> tuple[bytes, int, tuple[int, ...]]:
        """The identity of the capture: client, sequence and shape."""
        return self.client, self.sequence, self.shape

    @property
    def is_lost(self) -> bool:
        """Whether nothing identifies the record: it keeps its number and cannot be read."""
        return self.client == UNKNOWN_CLIENT and self.moment == UNKNOWN_MOMENT


@lru_cache(1024)
def session_of(client: bytes) -> int:
    """Return the `session` of a client's frames."""
    return int.from_bytes(client[:8], "little")


class RecordRow(RecordHead, array_like=True, gc=False):
    """The description of one record without its key, dtype and elements.

    Attributes:
        device: The device of the captured tensor.
        requires_grad: Whether the tensor required a gradient.
        is_leaf: Whether the tensor was a leaf of the autograd graph.
        metadata: A JSON object or empty.
        attributes: The JSON of the capture's attributes if they differ from the series' attributes, else empty.
        stats: The statistics of the elements, or None.
    """

    device: str = "cpu"
    requires_grad: bool = False
    is_leaf: bool = False
    metadata: str = ""
    attributes: str = ""
    stats: Optional[StatsRow] = None


_encode = msgspec.msgpack.Encoder().encode
encode_row: Callable[[RecordRow], bytes] = _encode
decode_row = msgspec.msgpack.Decoder(RecordRow).decode
decode_head = msgspec.msgpack.Decoder(RecordHead).decode


class Commit(msgspec.Struct, array_like=True):
    """The commit of the records first, first+1, …, which makes them valid. chunks: (index entry, offset, bytes)."""

    first: int
    rows: list[RecordRow]
    chunks: list[tuple[int, int, int]] = []


def encode_commit(
    first: int, rows: Sequence[Union[RecordRow, bytes]], chunks: Sequence[tuple[int, int, int]] = ()
) -> bytes:
    """Return the payload of a Commit. Rows that are bytes are already encoded."""
    return _encode((first, [msgspec.Raw(row) if isinstance(row, bytes) else row for row in rows], chunks))


class CommitHeads(msgspec.Struct, array_like=True):
    """A Commit whose rows are decoded only in part: a reader of one small record pays for all rows of its batch."""

    first: int
    rows: list[RecordHead]
    chunks: list[tuple[int, int, int]]


decode_heads = msgspec.msgpack.Decoder(CommitHeads).decode


class SeriesHeader(msgspec.Struct, array_like=True):
    """The description of a series: sufficient to restore its metadata and catalog rows.

    Attributes:
        path: The path of the series' group below the run.
        key: The key of the captured tensors.
        dtype: The name of a torch dtype, or `statistics_of` or `errors_of` one.
        codec: The explicit codec name.
        geometry: The chunk grid.
        attributes: The attributes of the captures.
    """

    path: str
    key: Key
    dtype: str
    codec: str
    geometry: Geometry
    attributes: dict[str, Any] = {}


class FileHeader(msgspec.Struct, array_like=True):
    """The first frame of a file. Only shards have a series and a shard number, small logs have none."""

    format: int
    run_id: str
    node: str
    series: Optional[SeriesHeader] = None
    shard: int = 0

    def foreign(self, run_ids: Container[str], node: str) -> str:
        """Return how it names another run or node; "" if it does not."""
        if self.run_id in run_ids and self.node == node:
            return ""
        return f"it belongs to run {self.run_id!r} of node {self.node!r}"


def frame(kind: FrameKind, payload: bytes, *marks: int, **named_marks: int) -> bytes:
    """Return the 48 header bytes that precede `payload` in the file, with the marks of `frame_header`.

    Raises:
        StoreError: The payload is too large.
    """
    return frame_header(kind, len(payload), crc32c(payload), *marks, **named_marks)


def frame_header(
    kind: FrameKind,
    nbytes: int,
    crc: int,
    ordinal: int = 0,
    session: int = 0,
    sequence: int = 0,
    raw_nbytes: int = 0,
) -> bytes:
    """Return the header of a payload of `nbytes` whose checksum is known.

    Raises:
        StoreError: The payload is too large.
    """
    if nbytes > MAX_PAYLOAD_NBYTES:
        raise StoreError(f"a {kind.name} frame of {nbytes} bytes exceeds the limit of {MAX_PAYLOAD_NBYTES}")
    head = _HEAD.pack(_MAGIC, FORMAT_VERSION, kind, 0, nbytes, ordinal, session, sequence, raw_nbytes, crc)
    return head + _CRC.pack(crc32c(head))


def parse_frame(held: bytes, at: int, base: int = 0) -> Frame | None:
    """Return the frame header at position `at` of `held`; None if there is no intact one.

    Args:
        held: Bytes of the file.
        at: The position of the header in `held`.
        base: The offset of `held` in the file.

    Raises:
        NotAStore: The frame is intact and has a newer format version.
    """
    head = held[at : at + FRAME_NBYTES]
    if len(head) < FRAME_NBYTES or head[:4] != _MAGIC or _CRC.unpack_from(head, 44)[0] != crc32c(head[:44]):
        return None
    _, version, kind, _, nbytes, ordinal, session, sequence, raw_nbytes, crc, _ = _HEADER.unpack(head)
    if version > FORMAT_VERSION:
        raise NotAStore(f"frame format {version} is newer than {FORMAT_VERSION}; use a newer capd to read it")
    known = _KINDS.get(kind)
    if known is None or nbytes > MAX_PAYLOAD_NBYTES:
        return None
    return Frame(known, nbytes, ordinal, session, sequence, raw_nbytes, crc, base + at + FRAME_NBYTES)


def read_frame(fd: int, offset: int, end: int) -> Frame | None:
    """Return the frame at `offset` of the file; None if no complete frame begins there and ends before `end`.

    Raises:
        NotAStore: The frame is intact and has a newer format version.
    """
    found = parse_frame(os.pread(fd, FRAME_NBYTES, offset), 0, offset)
    return None if found is None or found.offset + found.nbytes > end else found


def payload_is_sound(frame: Frame, payload: bytes) -> bool:
    """Return whether a payload matches its frame's length and checksum."""
    if len(payload) != frame.nbytes:
        return False
    covered = payload[:-4] if frame.kind is FrameKind.CHUNK else payload
    return crc32c(covered) == frame.crc


def walk(fd: int, offset: int, end: int) -> Iterator[Frame]:
    """Yield the frames from `offset` on. The walk ends at the first place without an intact frame."""
    while (found := read_frame(fd, offset, end)) is not None:
        yield found
        offset = found.offset + found.nbytes


def sound_end(fd: int, end: int) -> int:
    """Return the offset up to which all frames before `end` match their checksums."""
    at = 0
    for found in walk(fd, 0, end):
        if not payload_is_sound(found, os.pread(fd, found.nbytes, found.offset)):
            break
        at = found.offset + found.nbytes
    return at


_decoders: dict[FrameKind, msgspec.msgpack.Decoder[Any]] = {
    FrameKind.HEADER: msgspec.msgpack.Decoder(FileHeader),
    FrameKind.COMMIT: msgspec.msgpack.Decoder(Commit),
    FrameKind.SERIES: msgspec.msgpack.Decoder(SeriesHeader),
}


def decode_payload(fd: int, frame: Frame) -> Any:
    """Return the FileHeader, Commit or SeriesHeader of a frame; None if its payload is damaged."""
    return _decode(frame, os.pread(fd, frame.nbytes, frame.offset))


def decode_commit(frame: Frame, payload: bytes) -> Commit | None:
    """Return the Commit in the payload of a COMMIT frame; None if it is damaged."""
    found: Commit | None = _decode(frame, payload)
    return found


def _decode(frame: Frame, payload: bytes) -> Any:
    if not payload_is_sound(frame, payload):
        return None
    try:
        return _decoders[frame.kind].decode(payload)
    except msgspec.DecodeError:
        return None
