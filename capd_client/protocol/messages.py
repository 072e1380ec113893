"""The wire protocol between a rank (or a tool) and the node daemon, version 1. No I/O, no torch.

Transport: one unix stream socket per peer. The client first sends one byte. A rank sends `A` with the arena's
descriptor attached (SCM_RIGHTS); a tool sends `T` with no descriptor. After that both directions carry
`multiprocessing.connection` frames (length prefix) of at most MAX_FRAME_NBYTES. Each frame is one msgpack-encoded
message of the unions below. Nothing is pickled.

rank → daemon   HELLO, DEF, PUT, DROPS, FLUSH, STEERED, DRAINED, KEEP, PING, BYE
daemon → rank   WELCOME | REJECT, ACK, NACK, FLUSHED, STEER, DRAIN, KEPT, PONG, BYE_OK
tool → daemon   STATS, CONTROL, PING         daemon → tool   STATS_REPLY, CONTROL_REPLY, PONG, REJECT

Rules:

- HELLO comes first, within HANDSHAKE_TIMEOUT_S.
- A DEF precedes the first PUT or DROPS that names its id. Ids are per connection.
- Sequences are unique per client uuid and never reused. A PUT may repeat one after a reconnect; the daemon joins it to
  the work in progress, or acknowledges it again.
- ACK means that the records are committed, and frees their slots. With a flight recorder it means that they are held;
  the daemon then commits them, or lets them go as "expired".
- NACK means that the records will never be committed. The client counts the drop under the given reason.
- The daemon validates everything that a peer sends before it uses it. A violation ends that connection only, with
  REJECT and a text.
- STEER is the whole wanted state, not a change of it. A rank keeps the one with the highest id. It reports its state
  (STEERED) on every connection and after every change.

Parts: a tensor larger than the arena takes several descriptors with `part`, each with its own slot and sequence. ACK of
a part frees its slot, and means that this daemon does not need the part again. ACK of the last part acknowledges the
record. NACK of any part refuses the record.

Arena: a memfd, sealed SHRINK|GROW|SEAL (and FUTURE_WRITE if the kernel knows it). Page 0 is the counter page
(`capd_client.protocol.counter_page`); the journal (`capd_client.protocol.journal_layout`) and the slots follow it.
"""

from __future__ import annotations

from typing import Annotated, Any, Optional, Union

import msgspec
from msgspec import Meta

from capd_client.protocol.bounds import U64, Count, ShortText, Text, Uuid
from capd_client.protocol.control import (
    Control,
    ControlReply,
    Drain,
    Drained,
    Keep,
    KeepReply,
    Stats,
    StatsReply,
    Steer,
    Steered,
)
from capd_client.protocol.counter_page import DROP_REASONS
from capd_client.protocol.key import MAX_NDIM, Index, Key, Moment, Rank

__all__ = [
    "ARENA_BYTE", "HANDSHAKE_TIMEOUT_S", "MAX_BATCH", "MAX_FRAME_NBYTES", "MAX_KEYS", "MAX_METADATA_NBYTES",
    "PING_INTERVAL_S", "PROTOCOL_VERSION", "TOOL_BYTE", "Ack", "Bye", "ByeOk", "ClientMessage", "DaemonMessage",
    "Define", "Descriptor", "DropRow", "Drops", "Flush", "Flushed", "Hello", "Nack", "NackRow", "Part", "Ping", "Pong",
    "Put", "Reject", "Welcome", "decode_client", "decode_daemon", "encode",
]  # fmt: skip

PROTOCOL_VERSION = 2
MAX_FRAME_NBYTES = 1 << 20
# Descriptors in one PUT.
MAX_BATCH = 64
# DEFs on one connection.
MAX_KEYS = 1 << 20
# One capture's metadata as JSON, in UTF-8.
MAX_METADATA_NBYTES = 4096
HANDSHAKE_TIMEOUT_S = 5.0
# Three unanswered PINGs end a connection.
PING_INTERVAL_S = 5.0
ARENA_BYTE = b"A"
TOOL_BYTE = b"T"

Shape = Annotated[tuple[Index, ...], Meta(max_length=MAX_NDIM)]
KeyId = Annotated[int, Meta(ge=0, lt=MAX_KEYS)]
ReasonIndex = Annotated[int, Meta(ge=0, lt=len(DROP_REASONS))]


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """A rank introduces itself. `connection` counts up per uuid: a late HELLO of an old connection has a lower one."""

    protocol: int
    client: Uuid
    connection: Count
    run_id: Optional[ShortText] = None
    rank: Rank
    world_size: Rank = 1
    local_rank: Rank = 0
    host: ShortText = ""
    pid: Rank = 0
    arena_nbytes: Count
    attempt: Count = 0


class Welcome(msgspec.Struct, tag="welcome", kw_only=True):
    """The daemon opens the session.

    Attributes:
        epoch: A new one for every daemon process.
        run_id: The run that the daemon writes to.
        attempt: The attempt of the rank's records. It is above the one of HELLO if the run had ended.
        held_before: The records that the run held when a job continued it after its end; 0 for a job that began it.
    """

    protocol: int
    epoch: Uuid
    run_id: ShortText
    store: Text
    version: ShortText
    attempt: Count = 0
    held_before: Count = 0


class Reject(msgspec.Struct, tag="reject"):
    """The daemon ends the connection. Codes: version, peer, arena, superseded, run, malformed, closing."""

    code: ShortText
    message: Text
    retry: bool = False


class Define(msgspec.Struct, tag="def", kw_only=True):
    """Defines the id of a key on this connection.

    `attributes` holds the key's constant facts (layout, coordinates, cast_from).
    """

    id: KeyId
    key: Key
    dtype: ShortText
    attributes: dict[ShortText, Any] = {}


class Part(msgspec.Struct, array_like=True):
    """The place of a descriptor's bytes in a record larger than the arena: from byte `first` of `nbytes`.

    `record` is the record's sequence. It is smaller than the sequences of the parts, which come in order. Shape,
    moment, key and all other fields are the record's, and the daemon takes them from the last part. A part without
    bytes gives the record up.
    """

    record: U64
    first: U64
    nbytes: U64


class Descriptor(msgspec.Struct, array_like=True):
    """One capture in the arena: `nbytes` at `offset`, without gaps, of the dtype of Define(key_id).

    Attributes:
        shape: The tensor's shape in all cases.
        metadata: A JSON object in UTF-8, or empty.
        row_offset: The offset in the arena of the statistics row that the rank computed
            (`capd_client.protocol.statistics_row`), 8-byte aligned. None lets the daemon compute it.
        payload: False keeps only the statistics. The daemon computes them from the bytes; with a row_offset there are
            no bytes.
        part: The place of the bytes in a larger record; None if they are the whole tensor. A part has no row_offset.
        statistics: Compute statistics even if the daemon's settings omit them for tensors that it keeps.
        order: The tensor's axes in the order of the bytes, outermost first; None is C order. A part has none.
    """

    sequence: U64
    offset: U64
    nbytes: U64
    key_id: KeyId
    shape: Shape
    moment: Moment
    device: ShortText = "cpu"
    requires_grad: bool = False
    is_leaf: bool = False
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_NBYTES)] = b""
    row_offset: Optional[U64] = None
    payload: bool = True
    part: Optional[Part] = None
    statistics: bool = False
    order: Optional[Shape] = None

    @property
    def record(self) -> int:
        """The sequence of the record; that of the whole record for a part."""
        return self.sequence if self.part is None else self.part.record

    @property
    def record_nbytes(self) -> int:
        """The bytes of the whole record."""
        return self.nbytes if self.part is None else self.part.nbytes

    @property
    def ends_record(self) -> bool:
        """Whether this descriptor completes its record."""
        part = self.part
        return part is None or (self.nbytes > 0 and part.first + self.nbytes == part.nbytes)


class Put(msgspec.Struct, tag="put"):
    """A batch of descriptors, sequences ascending."""

    items: Annotated[list[Descriptor], Meta(max_length=MAX_BATCH)]


class DropRow(msgspec.Struct, array_like=True):
    """Cumulative drops of one key under one reason in this process.

    `nbytes` counts the bytes of their tensors, or of the requested slices, in the dtype of the key. It counts them also
    if only statistics would have been kept. It is 0 for a drop before the size is known (unsupported, invalid_key).
    """

    key_id: KeyId
    reason: ReasonIndex
    count: Count
    nbytes: Count
    first_iteration: Index
    last_iteration: Index


class Drops(msgspec.Struct, tag="drops"):
    """The rows of the drop ledger that changed since the last DROPS; counts are cumulative."""

    rows: Annotated[list[DropRow], Meta(max_length=1024)]


class Flush(msgspec.Struct, tag="flush"):
    """A rank asks for FLUSHED once every sequence ≤ `upto` received on this session is committed or refused."""

    id: Count
    upto: U64


class Flushed(msgspec.Struct, tag="flushed"):
    """The answer to FLUSH."""

    id: Count


class Ack(msgspec.Struct, tag="ack"):
    """Committed sequences as [first, last] ranges; frees their slots."""

    ranges: list[tuple[U64, U64]]


class NackRow(msgspec.Struct, array_like=True):
    """One sequence that will never be committed."""

    sequence: U64
    reason: ReasonIndex
    message: Text


class Nack(msgspec.Struct, tag="nack"):
    """Refused sequences; their slots are free."""

    rows: list[NackRow]


class Bye(msgspec.Struct, tag="bye"):
    """The rank leaves in an orderly way; its counter page is final."""


class ByeOk(msgspec.Struct, tag="bye_ok"):
    """The daemon has persisted the final counters."""


class Ping(msgspec.Struct, tag="ping"):
    """Asks for a PONG."""


class Pong(msgspec.Struct, tag="pong"):
    """Answers a PING."""


ClientMessage = Union[Hello, Define, Put, Drops, Flush, Steered, Drained, Keep, Bye, Ping, Stats, Control]
DaemonMessage = Union[
    Welcome, Reject, Ack, Nack, Flushed, Steer, Drain, KeepReply, ByeOk, Pong, StatsReply, ControlReply
]

_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_daemon_decoder = msgspec.msgpack.Decoder(DaemonMessage)


def encode(message: ClientMessage | DaemonMessage) -> bytes:
    """Encode one message as the payload of one frame."""
    return _encoder.encode(message)


def decode_client(frame: bytes) -> ClientMessage:
    """Decode a frame sent by a rank or tool. Raises msgspec.DecodeError (or ValidationError) on anything else."""
    message: ClientMessage = _client_decoder.decode(frame)
    return message


def decode_daemon(frame: bytes) -> DaemonMessage:
    """Decode a frame sent by the daemon. Raises msgspec.DecodeError on anything else."""
    message: DaemonMessage = _daemon_decoder.decode(frame)
    return message
