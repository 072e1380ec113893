"""The frames that make a shard file, and the node's small log, their own journal. Format version 1.

A shard is `[HEADER] ([CHUNK])* [COMMIT] … [index][crc32c]`: the Zarr v3 sharding index follows the last frame,
and since index entries are absolute offsets, readers skip the frames as gaps. A small log is
`[HEADER] ([SERIES] [RECORD] [COMMIT])*` and never becomes a Zarr file.

Frame header, 48 bytes, little-endian (struct `<4sBBHIIQQQII`):

  magic "CPDF", version u8 = 1, kind u8, 2 zero bytes, payload bytes u32, ordinal u32, session u64, sequence u64,
  raw bytes u64, payload crc32c u32, crc32c of the 44 bytes before it u32

kind     payload                                  ordinal
HEADER   msgpack FileHeader                       0
CHUNK    encoded inner chunk (ends in its crc)    chunk within the record (or batch)
COMMIT   msgpack Commit                           series reference in a small log, else 0
SERIES   msgpack SeriesHeader                     series reference, valid in this file
RECORD   a small record's raw bytes               series reference

`session` is the first 8 bytes of the client uuid, `sequence` the client's. A record exists once its COMMIT
frame is whole; frames behind the last COMMIT are leftovers of an interrupted write. The payload crc of a
CHUNK is the crc32c its payload ends with (it covers the rest); for the other kinds it covers the payload.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, Optional, Union

import msgspec

from capd.errors import NotAStore, StoreError
from capd.store.format.codecs import crc32c
from capd.store.format.geometry import Geometry
from capd_client.protocol.key import MAX_INDEX, Key, Moment

__all__ = [
    "FORMAT_VERSION", "FRAME_NBYTES", "MAX_PAYLOAD_NBYTES", "UNKNOWN_CLIENT", "UNKNOWN_MOMENT", "Commit", "FileHeader",
    "Frame", "FrameKind",
    "RecordHead", "RecordRow", "SeriesHeader", "StatsRow", "decode_commit", "decode_head", "decode_payload",
    "decode_row", "encode_commit", "encode_row", "frame", "frame_header", "parse_frame", "payload_is_sound",
    "read_frame", "session_of", "walk",
]  # fmt: skip

FORMAT_VERSION = 1
FRAME_NBYTES = 48
MAX_PAYLOAD_NBYTES = 64 << 20
UNKNOWN_CLIENT = bytes(16)  # of a record whose COMMIT is lost
UNKNOWN_MOMENT = Moment(MAX_INDEX)  # of one whose published columns are lost, too
_MAGIC = b"CPDF"
_HEADER = struct.Struct("<4sBBHIIQQQII")
_HEAD = struct.Struct("<4sBBHIIQQQI")  # without its own checksum
_CRC = struct.Struct("<I")


class FrameKind(IntEnum):
    """What a frame holds."""

    HEADER = 1
    CHUNK = 2
    COMMIT = 3
    SERIES = 4
    RECORD = 5


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(NamedTuple):
    """A frame's header and where its payload lies in the file."""

    kind: FrameKind
    nbytes: int
    ordinal: int
    session: int
    sequence: int
    raw_nbytes: int
    crc: int
    offset: int  # of the payload


Number = Union[int, float]


class StatsRow(msgspec.Struct, array_like=True, gc=False):
    """Statistics of one record, additive: see `capd.store.format.statistics`. exponents: sparse [bin, count, …]."""

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


class RecordHead(msgspec.Struct, array_like=True, gc=False):
    """What identifies a record and its shape. Decoding one from a RecordRow's bytes skips the rest."""

    client: bytes
    sequence: int
    shape: tuple[int, ...]
    nbytes: int
    moment: Moment

    @property
    def capture(self) -> tuple[bytes, int, tuple[int, ...]]:
        """Which capture this is: client, sequence and shape."""
        return self.client, self.sequence, self.shape

    @property
    def is_lost(self) -> bool:
        """Whether nothing says what the record was: it keeps its number, and cannot be read."""
        return self.client == UNKNOWN_CLIENT and self.moment == UNKNOWN_MOMENT


@lru_cache(1024)
def session_of(client: bytes) -> int:
    """What a client's frames bear as `session`."""
    return int.from_bytes(client[:8], "little")


class RecordRow(RecordHead, array_like=True, gc=False):
    """Everything about one record but its key, dtype and elements."""

    device: str = "cpu"
    requires_grad: bool = False
    is_leaf: bool = False
    metadata: str = ""  # JSON object or empty
    attributes: str = ""  # JSON of the capture's attributes where they differ from the series'
    stats: Optional[StatsRow] = None


_encode = msgspec.msgpack.Encoder().encode
encode_row: Callable[[RecordRow], bytes] = _encode
decode_row = msgspec.msgpack.Decoder(RecordRow).decode
decode_head = msgspec.msgpack.Decoder(RecordHead).decode


class Commit(msgspec.Struct, array_like=True):
    """Makes the records first, first+1, … real. chunks: (index entry in the shard, offset, bytes)."""

    first: int
    rows: list[RecordRow]
    chunks: list[tuple[int, int, int]] = []


def encode_commit(
    first: int, rows: Sequence[Union[RecordRow, bytes]], chunks: Sequence[tuple[int, int, int]] = ()
) -> bytes:
    """The payload of a Commit. Rows that are bytes were encoded before."""
    return _encode((first, [msgspec.Raw(row) if isinstance(row, bytes) else row for row in rows], chunks))


class SeriesHeader(msgspec.Struct, array_like=True):
    """What a series is: enough to rebuild its metadata and catalog rows."""

    path: str
    key: Key
    dtype: str  # a torch dtype's name, or `statistics_of` one
    codec: str
    geometry: Geometry
    attributes: dict[str, Any] = {}


class FileHeader(msgspec.Struct, array_like=True):
    """First frame of a file. series and shard are set for shards, absent for small logs."""

    format: int
    run_id: str
    node: str
    series: Optional[SeriesHeader] = None
    shard: int = 0


def frame(
    kind: FrameKind,
    payload: bytes,
    ordinal: int = 0,
    session: int = 0,
    sequence: int = 0,
    raw_nbytes: int = 0,
) -> bytes:
    """The 48 header bytes for `payload` (written right behind them). Raises StoreError for one that is too large."""
    return frame_header(kind, len(payload), crc32c(payload), ordinal, session, sequence, raw_nbytes)


def frame_header(
    kind: FrameKind,
    nbytes: int,
    crc: int,
    ordinal: int = 0,
    session: int = 0,
    sequence: int = 0,
    raw_nbytes: int = 0,
) -> bytes:
    """The same for a payload of `nbytes` whose checksum is known."""
    if nbytes > MAX_PAYLOAD_NBYTES:
        raise StoreError(f"a {kind.name} frame of {nbytes} bytes exceeds the limit of {MAX_PAYLOAD_NBYTES}")
    head = _HEAD.pack(_MAGIC, FORMAT_VERSION, kind, 0, nbytes, ordinal, session, sequence, raw_nbytes, crc)
    return head + _CRC.pack(crc32c(head))


def parse_frame(held: bytes, at: int, base: int = 0) -> Frame | None:
    """The frame header at `at` in `held`, or None if no sound one stands there. base: where `held` begins in the file.

    Raises NotAStore for a sound frame of a newer format version.
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
    """The frame at `offset` of the file, or None if no whole frame stands there before `end`.

    Raises NotAStore for a sound frame of a newer format version.
    """
    found = parse_frame(os.pread(fd, FRAME_NBYTES, offset), 0, offset)
    return None if found is None or found.offset + found.nbytes > end else found


def payload_is_sound(frame: Frame, payload: bytes) -> bool:
    """Whether a payload read back matches its frame's checksum."""
    if len(payload) != frame.nbytes:
        return False
    covered = payload[:-4] if frame.kind is FrameKind.CHUNK else payload
    return crc32c(covered) == frame.crc


def walk(fd: int, offset: int, end: int) -> Iterator[Frame]:
    """Frames from `offset` on, until the first place where none stands."""
    while (found := read_frame(fd, offset, end)) is not None:
        yield found
        offset = found.offset + found.nbytes


_decoders: dict[FrameKind, msgspec.msgpack.Decoder[Any]] = {
    FrameKind.HEADER: msgspec.msgpack.Decoder(FileHeader),
    FrameKind.COMMIT: msgspec.msgpack.Decoder(Commit),
    FrameKind.SERIES: msgspec.msgpack.Decoder(SeriesHeader),
}


def decode_payload(fd: int, frame: Frame) -> Any:
    """FileHeader, Commit or SeriesHeader of a frame, or None if its payload is damaged."""
    return _decode(frame, os.pread(fd, frame.nbytes, frame.offset))


def decode_commit(frame: Frame, payload: bytes) -> Commit | None:
    """The Commit that a COMMIT frame's payload holds, or None if it is damaged."""
    found: Commit | None = _decode(frame, payload)
    return found


def _decode(frame: Frame, payload: bytes) -> Any:
    if not payload_is_sound(frame, payload):
        return None
    try:
        return _decoders[frame.kind].decode(payload)
    except msgspec.DecodeError:
        return None
