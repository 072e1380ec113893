"""The frame of a held record in a segment file: a fixed head, the description as msgpack, then the raw bytes.

    magic u64, bytes of the description u32, its crc32c u32, bytes of the data u64, their crc32c u32, client and
    sequence of the record, client and sequence of the record before it, crc32c of the preceding bytes u32

The head is written last. A frame with a valid head is whole, unless the disk or the power failed. The checksums find
that. A record whose own head is damaged is named by the next head.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from capd.store.format.codecs import crc32c
from capd_client.protocol.messages import Define, Descriptor
from capd_client.protocol.statistics_row import ROW_NBYTES

__all__ = [
    "HEAD_NBYTES",
    "MAGIC",
    "MAX_DESCRIPTION_NBYTES",
    "NOBODY",
    "FrameHead",
    "HeldIdentity",
    "HeldRecord",
    "decode_record",
    "encode_record",
]

MAGIC = b"CPHELD02"
_HEAD = struct.Struct("<8sIIQI16sQ16sQ")
_CRC = struct.Struct("<I")
HEAD_NBYTES = _HEAD.size + _CRC.size
# A definition comes in one frame of the protocol; the rest is small.
MAX_DESCRIPTION_NBYTES = 32 << 20
_CLIENT_NBYTES = 16


class HeldIdentity(NamedTuple):
    """The client and the sequence of a held record."""

    client: bytes
    sequence: int


NOBODY = HeldIdentity(bytes(_CLIENT_NBYTES), 0)
"""What stands before the first record of a segment."""


class HeldRecord(msgspec.Struct, array_like=True):
    """The description of a held record. The descriptor is that of the whole record, in C order.

    Attributes:
        row: The packed statistics row of the rank; None if it sent none.
    """

    client: bytes
    sequence: int
    define: Define
    descriptor: Descriptor
    row: bytes | None = None

    @property
    def problem(self) -> bool:
        """Whether its parts contradict each other. The bytes may come from anybody."""
        item = self.descriptor
        return (
            len(self.client) != _CLIENT_NBYTES
            or item.sequence != self.sequence
            or item.part is not None
            or item.order is not None
            or not item.payload
            or (self.row is not None and len(self.row) != ROW_NBYTES)
        )


class FrameHead(msgspec.Struct, frozen=True):
    """The head of a frame: the sizes and checksums of its description and of its data, and whose record it is.

    Attributes:
        before: The record of the preceding frame.
    """

    description_nbytes: int
    description_crc: int
    nbytes: int
    crc: int
    identity: HeldIdentity
    before: HeldIdentity

    def encode(self) -> bytes:
        """Return the bytes of the head."""
        head = _HEAD.pack(
            MAGIC, self.description_nbytes, self.description_crc, self.nbytes, self.crc,
            *self.identity, *self.before,
        )  # fmt: skip
        return head + _CRC.pack(crc32c(head))

    @classmethod
    def decode(cls, data: bytes) -> FrameHead | None:
        """Return the head in `data`; None if there is none."""
        if len(data) < HEAD_NBYTES or _CRC.unpack_from(data, _HEAD.size)[0] != crc32c(data[: _HEAD.size]):
            return None
        magic, description_nbytes, description_crc, nbytes, crc, *both = _HEAD.unpack_from(data)
        if magic != MAGIC or description_nbytes > MAX_DESCRIPTION_NBYTES:
            return None
        return cls(
            description_nbytes, description_crc, nbytes, crc, HeldIdentity(*both[:2]), HeldIdentity(*both[2:])
        )

    @property
    def frame_nbytes(self) -> int:
        """The bytes of the whole frame."""
        return HEAD_NBYTES + self.description_nbytes + self.nbytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HeldRecord).decode


def encode_record(record: HeldRecord) -> bytes:
    """Return the description as bytes."""
    return _encode(record)


def decode_record(data: bytes, head: FrameHead) -> HeldRecord | None:
    """Return the record that `data` describes; None if it is damaged or contradicts itself or its head."""
    if len(data) != head.description_nbytes or crc32c(data) != head.description_crc:
        return None
    try:
        record = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_other = head.identity != (record.client, record.sequence) or record.descriptor.nbytes != head.nbytes
    return None if record.problem or is_other else record
