"""The messages between a daemon and the process that measures for it: msgpack over a socket, one answer each."""

from __future__ import annotations

import msgspec

__all__ = [
    "MAX_ANSWER_NBYTES",
    "MAX_ORDER_NBYTES",
    "MeasureOrder",
    "MeasuredAnswer",
    "decode_answer",
    "decode_order",
]

MAX_ORDER_NBYTES = 64 << 10
MAX_ANSWER_NBYTES = 1 << 20


class MeasureOrder(msgspec.Struct, frozen=True, array_like=True):
    """A tensor to measure. It lies in the shared memory, in C order.

    Attributes:
        offset: Its first byte there.
        client, sequence: The capture, as its record names it.
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]
    client: bytes
    sequence: int


class MeasuredAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to an order; the first one says that the process is ready.

    Attributes:
        cpu_s: The CPU time of the process since its last answer.
        row: The errors, as they are stored; b"" if there are none.
        problem: Why there are none.
    """

    cpu_s: float
    row: bytes = b""
    problem: str = ""


decode_order = msgspec.msgpack.Decoder(MeasureOrder).decode
decode_answer = msgspec.msgpack.Decoder(MeasuredAnswer).decode
