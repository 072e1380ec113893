"""Wire protocol between a rank (or a tool) and the node daemon, version 1. No I/O, no torch.

Transport: one unix stream socket per peer. The client first sends one byte: `A` with the arena's
descriptor attached (SCM_RIGHTS) when it is a rank, `T` without one when it is a tool. After that both
directions carry `multiprocessing.connection` frames (length prefix) of at most MAX_FRAME_NBYTES, each one
msgpack-encoded message of the unions below. Never pickle.

rank → daemon   HELLO, DEF, PUT, DROPS, FLUSH, STEERED, DRAINED, PING, BYE
daemon → rank   WELCOME | REJECT, ACK, NACK, FLUSHED, STEER, DRAIN, PONG, BYE_OK
tool → daemon   STATS, CONTROL, PING         daemon → tool   STATS_REPLY, CONTROL_REPLY, PONG, REJECT

Rules. HELLO comes first and within HANDSHAKE_TIMEOUT_S. A DEF precedes the first PUT or DROPS that names
its id; ids are per connection. Sequences are unique per client uuid and never reused; a PUT may repeat one
after a reconnect (the daemon joins it to the work in progress, or acknowledges again). ACK is the
daemon's word that the records are committed and frees their slots. NACK means never committed: the client
counts the drop under the reason given. Everything a peer sends is validated before use; a violation ends
that connection only, with REJECT and a text. STEER is the whole wanted state and no change of one: a rank keeps
the one with the highest id, and tells what it holds (STEERED) on every connection and whenever that changes.

Parts. A tensor larger than the arena is several descriptors with `part`, each in a slot and under a sequence of
its own. ACK of a part frees its slot and says only that this daemon need not be sent it again; ACK of the last one is
the record's. NACK of any of them is the record's.

Arena. Page 0 (PAGE_NBYTES) is the counter page: native-endian u64 words, written by the client only:
word 0 COUNTER_MAGIC, 1 offered, 2 acked, 3 in flight (live slots), 4 … 4+len(DropReason) drops by
DropReason index, 256 the iterations begun (1 + the current one; 0 before the first). Slots lie behind it. The
memfd is sealed SHRINK|GROW|SEAL (and FUTURE_WRITE where known).
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, Optional, Union

import msgspec
from msgspec import Meta

from capd_client.key import MAX_NDIM, Index, Key, Moment, Rank
from capd_client.select import Selection

__all__ = [
    "ARENA_BYTE", "COUNTER_ACKED", "COUNTER_DROPS", "COUNTER_IN_FLIGHT", "COUNTER_MAGIC", "COUNTER_OFFERED",
    "COUNTER_STEPS", "DROP_REASONS", "HANDSHAKE_TIMEOUT_S", "MAX_BATCH", "MAX_FRAME_NBYTES", "MAX_KEYS",
    "MAX_METADATA_NBYTES", "MAX_TEXT_CHARS", "MAX_WAIT_S", "PAGE_NBYTES", "PING_INTERVAL_S", "PROTOCOL_VERSION",
    "TOOL_BYTE", "Ack", "Bye", "ByeOk", "ClientMessage", "Control", "ControlReply", "DaemonMessage", "Define",
    "Descriptor", "Drain", "Drained", "DropReason", "DropRow", "Drops", "Flush", "Flushed", "Hello", "Nack",
    "NackRow", "Part", "Ping", "Pong", "Put", "Reject", "Stats", "StatsReply", "Steer", "Steered", "Verb", "Welcome",
    "decode_client", "decode_daemon", "encode",
]  # fmt: skip

PROTOCOL_VERSION = 1
MAX_FRAME_NBYTES = 1 << 20
MAX_BATCH = 64  # descriptors in one PUT
MAX_KEYS = 1 << 20  # DEFs on one connection
MAX_METADATA_NBYTES = 4096  # JSON text of one capture's free metadata
MAX_TEXT_CHARS = 8192  # of one message to a user
HANDSHAKE_TIMEOUT_S = 5.0
MAX_WAIT_S = 3600.0  # a CONTROL is answered within this time
PING_INTERVAL_S = 5.0  # three unanswered PINGs end a connection
ARENA_BYTE = b"A"
TOOL_BYTE = b"T"

PAGE_NBYTES = 4096
COUNTER_MAGIC = 0x3130_4447_5044_5043  # "CPDPGD01" read as a little-endian u64
COUNTER_OFFERED, COUNTER_ACKED, COUNTER_IN_FLIGHT, COUNTER_DROPS = 1, 2, 3, 4
COUNTER_STEPS = 256  # behind the room for further reasons


class DropReason(enum.Enum):
    """Why a capture was given up. The order is wire format (counter page): append, never reorder."""

    __hash__ = object.__hash__  # Enum's own is Python code, and every drop asks for it twice

    ARENA_FULL = "arena_full"  # the arena had no room (policy drop, or block after max_block_ms)
    RING_FULL = "ring_full"  # the device snapshot ring had no room
    TOO_LARGE = "too_large"  # larger than the arena or the ring can ever hold
    UNSUPPORTED = "unsupported"  # complex, sparse, meta, quantised or unknown dtype
    INVALID_KEY = "invalid_key"  # a name, index or metadata outside the limits
    INTERNAL = "internal"  # an error inside capd in the rank; logged
    NOT_CONNECTED = "not_connected"  # still unacknowledged when the rank closed
    REJECTED = "rejected"  # the daemon refused the session
    BAD_DESCRIPTOR = "bad_descriptor"  # the daemon refused the descriptor
    DISK_FULL = "disk_full"  # max_disk or keep_free reached, or ENOSPC
    STORE_ERROR = "store_error"  # the store could not write the record
    RANK_DIED = "rank_died"  # counted by the daemon: the rank died before handing it over
    STREAM_CAPTURE = "stream_capture"  # a CUDA graph was being captured
    STEP_BUDGET = "step_budget"  # beyond max_mb_per_step of its iteration
    SAMPLED = "sampled"  # mode sample:1/N does not keep its call
    MUTATED = "mutated"  # declared immutable, and changed before its bytes were copied
    PARTS_LOST = "parts_lost"  # the daemon was restarted amid the parts of a record
    STOPPED = "stopped"  # `capd ctl stop` was in force
    THINNED = "thinned"  # policy thin left out its call, because a buffer had been full


DROP_REASONS: tuple[DropReason, ...] = tuple(DropReason)

U64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Uuid = Annotated[bytes, Meta(min_length=16, max_length=16)]
ShortText = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Shape = Annotated[tuple[Index, ...], Meta(max_length=MAX_NDIM)]
KeyId = Annotated[int, Meta(ge=0, lt=MAX_KEYS)]
Verb = Literal["status", "start", "stop", "select", "flush", "seal", "shutdown"]
ReasonIndex = Annotated[int, Meta(ge=0, lt=len(DROP_REASONS))]


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """A rank introduces itself. `connection` counts up per uuid, so that a late old one is told apart."""

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
    """The session stands. `epoch` is new for every daemon process; `run_id` is the run it writes to."""

    protocol: int
    epoch: Uuid
    run_id: ShortText
    store: Text
    version: ShortText


class Reject(msgspec.Struct, tag="reject"):
    """The daemon ends the connection. Codes: version, peer, arena, superseded, run, malformed, closing."""

    code: ShortText
    message: Text
    retry: bool = False


class Define(msgspec.Struct, tag="def", kw_only=True):
    """Interns a key on this connection. `attributes`: what is constant for it (layout, coordinates, cast_from)."""

    id: KeyId
    key: Key
    dtype: ShortText
    attributes: dict[ShortText, Any] = {}


class Part(msgspec.Struct, array_like=True):
    """Which bytes of a record larger than the arena a descriptor brings: its own, from byte `first` of `nbytes` on.

    `record` is the record's sequence, smaller than those of its parts, which come in order. Shape, moment, key and all
    else is the record's, and counts in the last part. A part without bytes gives the record up.
    """

    record: U64
    first: U64
    nbytes: U64


class Descriptor(msgspec.Struct, array_like=True):
    """One capture in the arena: `nbytes` at `offset`, contiguous, C order, of Define(key_id)'s dtype.

    row_offset: where in the arena the rank put a statistics row that it computed (`capd_client.statistics_row`),
    8-byte aligned; None lets the daemon compute. payload: False keeps only the statistics; the bytes are there for
    the daemon to compute them from, and with a row_offset there are none. shape is the tensor's in any case.
    part: the bytes are a part of the capture's; None where they are all of them. A part has no row_offset.
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
    metadata: Annotated[str, Meta(max_length=MAX_METADATA_NBYTES)] = ""  # a JSON object, or empty
    row_offset: Optional[U64] = None
    payload: bool = True
    part: Optional[Part] = None

    @property
    def record(self) -> int:
        """The sequence of the record that this is, or is a part of."""
        return self.sequence if self.part is None else self.part.record

    @property
    def record_nbytes(self) -> int:
        """Bytes of the whole record."""
        return self.nbytes if self.part is None else self.part.nbytes

    @property
    def ends_record(self) -> bool:
        """Whether the record is whole with this."""
        part = self.part
        return part is None or (self.nbytes > 0 and part.first + self.nbytes == part.nbytes)


class Put(msgspec.Struct, tag="put"):
    """A batch of descriptors, sequences ascending."""

    items: Annotated[list[Descriptor], Meta(max_length=MAX_BATCH)]


class DropRow(msgspec.Struct, array_like=True):
    """Cumulative drops of one key under one reason in this process."""

    key_id: KeyId
    reason: ReasonIndex
    count: Count
    nbytes: Count
    first_iteration: Index
    last_iteration: Index


class Drops(msgspec.Struct, tag="drops"):
    """The rows of the drop ledger that changed since the last one; counts are cumulative."""

    rows: Annotated[list[DropRow], Meta(max_length=1024)]


class Flush(msgspec.Struct, tag="flush"):
    """Answer once every sequence ≤ `upto` received on this session is committed or refused."""

    id: Count
    upto: U64


class Flushed(msgspec.Struct, tag="flushed"):
    """Answer to FLUSH."""

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
    """The rank leaves in order; its counter page is final."""


class ByeOk(msgspec.Struct, tag="bye_ok"):
    """The daemon has persisted the final counters."""


class Ping(msgspec.Struct, tag="ping"):
    """Asks for a PONG."""


class Pong(msgspec.Struct, tag="pong"):
    """Answers a PING."""


class Stats(msgspec.Struct, tag="stats"):
    """A tool asks for live counters, of one run or of all."""

    run_id: Optional[ShortText] = None


class StatsReply(msgspec.Struct, tag="stats_reply"):
    """Counters as JSON-compatible data; the schema is `capd.metrics.DaemonStats`."""

    stats: dict[str, Any]


class Control(msgspec.Struct, tag="control"):
    """A tool asks for an action. `run_id` None: the only live run (seal: all of them).

    status: how each rank of the run is steered. start, select: capture, as the job says or as `selection` does.
    stop: capture nothing. These three hold from `from_iteration`, or the next one that every rank can still begin
    together, and are answered once they are in force on every live rank, at the latest after `wait_s`. flush: as
    soon as everything captured so far is committed. seal: publish a run's records. shutdown: end the daemon.
    """

    verb: Verb
    run_id: Optional[ShortText] = None
    selection: Optional[Selection] = None
    from_iteration: Optional[Index] = None
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class ControlReply(msgspec.Struct, tag="control_reply"):
    """Outcome of a CONTROL. nothing: there is no such run, rank or module. `message` says it in words.

    ranks: the live ranks of the run, each as `capd.metrics.RankControl`; empty where one frame cannot hold them.
    """

    code: Literal["ok", "failed", "usage", "nothing"]
    message: Text
    ranks: list[dict[str, Any]] = []

    @property
    def ok(self) -> bool:
        """Whether it was done."""
        return self.code == "ok"


class Steer(msgspec.Struct, tag="steer", frozen=True, kw_only=True):
    """The capture that is wanted of a rank, from the first iteration it begins at or behind `from_iteration`.

    id: grows with every change in a run. capturing False: nothing is captured. selection None: as the job says.
    """

    id: Count
    from_iteration: Index
    capturing: bool = True
    selection: Optional[Selection] = None


class Steered(msgspec.Struct, tag="steered", kw_only=True):
    """How a rank is steered: `in_force` since its iteration `since`, `pending` until its next boundary.

    id: of the newest STEER it met; `problem` says why that one could not be followed. modules: how many modules
    are captured under `in_force`, on this rank.
    """

    id: Count
    in_force: Optional[Steer] = None
    since: Optional[Index] = None
    pending: Optional[Steer] = None
    modules: Count = 0
    problem: Text = ""


class Drain(msgspec.Struct, tag="drain"):
    """Answer once everything captured before is committed or dropped. Ids grow within a session."""

    id: Count


class Drained(msgspec.Struct, tag="drained"):
    """Answer to DRAIN."""

    id: Count


ClientMessage = Union[Hello, Define, Put, Drops, Flush, Steered, Drained, Bye, Ping, Stats, Control]
DaemonMessage = Union[
    Welcome, Reject, Ack, Nack, Flushed, Steer, Drain, ByeOk, Pong, StatsReply, ControlReply
]

_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_daemon_decoder = msgspec.msgpack.Decoder(DaemonMessage)


def encode(message: ClientMessage | DaemonMessage) -> bytes:
    """Encode one message as the payload of one frame."""
    return _encoder.encode(message)


def decode_client(frame: bytes) -> ClientMessage:
    """Decode a frame sent by a rank or tool; raises msgspec.DecodeError (or ValidationError) on anything else."""
    message: ClientMessage = _client_decoder.decode(frame)
    return message


def decode_daemon(frame: bytes) -> DaemonMessage:
    """Decode a frame sent by the daemon; raises msgspec.DecodeError on anything else."""
    message: DaemonMessage = _daemon_decoder.decode(frame)
    return message
