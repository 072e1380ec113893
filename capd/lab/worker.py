"""The process that measures for a daemon: python -m capd.lab.worker SOCKET MEMORY NBYTES FORMATS.

The daemon starts it, because torch does not belong into the daemon. SOCKET and MEMORY are descriptors that it
inherits. It has one thread, takes only CPU time that nobody else wants, and ends when the daemon is
gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import time
from collections.abc import Sequence
from math import prod
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from capd.lab.messages import MAX_ORDER_NBYTES, MeasuredAnswer, MeasureOrder, decode_order

if TYPE_CHECKING:
    from capd.analyze.format_choice import FormatChoice

__all__ = ["main"]

_NICE = 19


def main(words: Sequence[str]) -> None:
    """Answer orders until the daemon closes the socket."""
    descriptor, memory_fd, nbytes, formats = words
    # They are for the daemon, which closes the socket when it is done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # If memory runs out, this process is the one to lose.
        file.write("1000")
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    connection = Connection(int(descriptor))
    memory = mmap.mmap(int(memory_fd), int(nbytes), prot=mmap.PROT_READ)
    os.close(int(memory_fd))
    with contextlib.suppress(EOFError, OSError):
        try:
            chosen = _prepared(formats)
        except Exception as error:
            _send(connection, MeasuredAnswer(0.0, problem=_said(error)))
            return
        with contextlib.suppress(OSError):
            # From now on it takes only CPU time that nobody else wants. Starting so would take minutes on a busy node.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        _send(connection, MeasuredAnswer(time.process_time()))
        _serve(connection, memory, chosen)


def _prepared(formats: str) -> tuple[FormatChoice, ...]:
    import torch

    from capd.analyze.format_choice import choices

    torch.set_num_threads(1)
    return choices(formats)


def _serve(connection: Connection, memory: mmap.mmap, chosen: Sequence[FormatChoice]) -> None:
    used = time.process_time()
    while True:
        order = decode_order(connection.recv_bytes(MAX_ORDER_NBYTES))
        try:
            row, problem = _measured(memory, order, chosen), ""
        except Exception as error:
            # One tensor must not end the measuring of all others.
            row, problem = b"", _said(error)
        now = time.process_time()
        _send(connection, MeasuredAnswer(now - used, row, problem))
        used = now


def _measured(memory: mmap.mmap, order: MeasureOrder, chosen: Sequence[FormatChoice]) -> bytes:
    from capd.lab.measuring import measured_bits
    from capd.lab.stored_errors import StoredErrors, pack_row
    from capd.store.format.dtypes import stored_type

    stored = stored_type(order.dtype).stored
    bits = np.frombuffer(memory, stored, prod(order.shape), order.offset).reshape(order.shape)
    # torch warns of tensors that cannot be written to.
    errors, problems = measured_bits(bits.copy(), order.dtype, chosen)
    return pack_row(StoredErrors(order.client, order.sequence, errors, problems))


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _send(connection: Connection, answer: MeasuredAnswer) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
