"""Anything may arrive on a socket: decoding it neither crashes nor hangs nor takes memory beyond a limit.

CI runs a slice; the slow tier runs FUZZ_EXAMPLES of each, or as many as CAPD_FUZZ_EXAMPLES says.
"""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from capd_client.protocol.control import Control, Drain, Drained, Keep, Stats, Steer, Steered
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    MAX_FRAME_NBYTES,
    Ack,
    Bye,
    Define,
    Descriptor,
    DropRow,
    Drops,
    Flush,
    Hello,
    Nack,
    NackRow,
    Ping,
    Put,
    Reject,
    Welcome,
    decode_client,
    decode_daemon,
    encode,
)
from capd_client.protocol.selection import Selection

EXAMPLES = int(os.environ.get("CAPD_FUZZ_EXAMPLES", "20000"))
ALLOCATED_PER_BYTE = 600  # of a frame: a one-byte descriptor field becomes a Python object of up to 100 bytes
ALLOCATED_ALWAYS = 64 << 10

KEY = Key(quant_type="bf16", rank=0, tensor_name="x")
SELECTION = Selection(steps="0-:100", ranks="0", modules=("*.mlp.*", "head"), tensors=("input", "weight"))
STEER = Steer(id=9, from_iteration=7, capturing=True, selection=SELECTION)
MESSAGES = [
    encode(message)
    for message in (
        Hello(protocol=2, client=b"c" * 16, connection=1, run_id="run", rank=0, arena_nbytes=1 << 20),
        Define(id=0, key=KEY, dtype="bfloat16", attributes={"cast_from": "float32", "list": [1, None, 2.5]}),
        Put([Descriptor(n, 4096, 8, 0, (2, 2), Moment(iteration=n), metadata=b"{}") for n in range(3)]),
        Drops([DropRow(0, 1, 2, 3, 4, 5)]),
        Flush(1, 2),
        Bye(),
        Ping(),
        Stats("run"),
        Control("seal", "run"),
        Control("select", "run", SELECTION, 7, 30.0),
        STEER,
        Steered(id=9, in_force=STEER, since=7, pending=STEER, modules=3, problem="no"),
        Drain(7),
        Drained(7),
        Keep(3, "loss spike", 12),
        Welcome(protocol=2, epoch=b"e" * 16, run_id="run", store="/s", version="1"),
        Reject("run", "no", retry=True),
        Ack([(1, 5), (7, 9)]),
        Nack([NackRow(3, 1, "no room")]),
    )
]
BOMBS = [
    b"\xdf\xff\xff\xff\xff" + bytes(64),  # a map of 2³² entries
    b"\xdd\xff\xff\xff\xff" + bytes(64),  # a list of 2³²
    b"\xc6\xff\xff\xff\xff" + bytes(64),  # 4 GiB of bytes
    b"\x91" * 100_000 + b"\xc0",  # nested lists
    b"\x81\xa1a" * 50_000 + b"\xc0",
    b"\x82\xa4type\xa3put\xa5items\xdc\xff\xff" + b"\x90" * 70_000,
    b"\x82\xa4type\xa3ack\xa6ranges\xdd\x00\x03\xff\xff" + b"\x92\x00\x00" * 262_143,
    b"\x84\xa4type\xa3def\xa2id\x00\xa5dtype\xa1x\xaaattributes" + b"\x81\xa1a" * 100_000 + b"\xc0",
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(max_size=64),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(
    [
        "type",
        "id",
        "key",
        "dtype",
        "attributes",
        "items",
        "rows",
        "ranges",
        "protocol",
        "client",
        "run_id",
        "rank",
        "selection",
        "in_force",
    ]
)
types = st.sampled_from(
    [
        "hello",
        "def",
        "put",
        "drops",
        "flush",
        "bye",
        "ping",
        "stats",
        "control",
        "steer",
        "steered",
        "ack",
        "nack",
        "welcome",
        "zzz",
    ]
)


@st.composite
def mutated(draw: Any) -> bytes:
    """A sound message with some bytes replaced, removed, repeated, or a piece of another one in it."""
    frame = bytearray(draw(st.sampled_from(MESSAGES)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        kind = draw(st.integers(0, 4))
        if kind == 0 and frame:
            frame[at] = draw(st.integers(0, 255))
        elif kind == 1:
            del frame[at : at + draw(st.integers(1, 8))]
        elif kind == 2:
            frame[at:at] = draw(st.binary(max_size=16))
        elif kind == 3:
            other = draw(st.sampled_from(MESSAGES))
            frame[at:at] = other[: draw(st.integers(0, len(other)))]
        else:
            frame[at:at] = frame[at : at + draw(st.integers(1, 64))] * draw(st.integers(1, 50))
    return bytes(frame)


@st.composite
def shaped(draw: Any) -> bytes:
    """A map that looks like a message, with values of any kind."""
    message = {"type": draw(types), **draw(st.dictionaries(fields, json_values, max_size=6))}
    try:
        return msgspec.msgpack.encode(message)
    except (OverflowError, UnicodeEncodeError):
        return b""


frames = st.binary(max_size=4096) | mutated() | shaped() | st.sampled_from(BOMBS)


def decode_all(frame: bytes) -> None:
    """Both decoders: a message, or an error of the kind that ends a connection, within the limit of memory."""
    assert len(frame) <= MAX_FRAME_NBYTES
    for decode in (decode_client, decode_daemon):
        tracemalloc.start()
        try:
            message = decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = None
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < ALLOCATED_ALWAYS + ALLOCATED_PER_BYTE * len(frame)
        if message is not None:
            assert decode(encode(message)) == message or "nan" in repr(message)


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_what_announces_more_than_it_brings_takes_no_memory(bomb: bytes) -> None:
    decode_all(bomb)


@settings(max_examples=400)
@given(frames)
@example(b"")
def test_any_frame_is_a_message_or_an_error(frame: bytes) -> None:
    decode_all(frame)


@pytest.mark.fault
@pytest.mark.timeout(1800)
@settings(max_examples=EXAMPLES)
@given(frames)
def test_any_frame_is_a_message_or_an_error_in_many_examples(frame: bytes) -> None:
    decode_all(frame)
