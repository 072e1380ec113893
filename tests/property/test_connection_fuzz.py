"""Whole connections of sound and unsound messages in any order, against a real daemon: it serves everybody else.

Each example is one peer. It may say anything, framed or not, and hang up anywhere; the daemon answers, refuses or ends
that connection, keeps no descriptor of it, and what it had acknowledged can be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capd.server.runs.upkeep import MAX_LOST
from capd_client.protocol.control import Control, Stats
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    ARENA_BYTE,
    MAX_BATCH,
    MAX_FRAME_NBYTES,
    TOOL_BYTE,
    Bye,
    Define,
    Descriptor,
    DropRow,
    Drops,
    Flush,
    Hello,
    Part,
    Ping,
    Put,
    encode,
)
from tests.kit.daemon import ARENA_NBYTES, DaemonProcess, Rank, make_memfd, wait_for
from tests.kit.processes import capd

EXAMPLES = int(os.environ.get("CAPD_FUZZ_EXAMPLES", "2000"))
ANON_NBYTES = 300 << 20

big = st.integers(0, 2**63 - 1)
index = st.integers(0, 4) | st.integers(0, 2**31 - 1)
names = st.text(max_size=12) | st.sampled_from(["x", "../x", "zarr.json", "a/b", "\0", "x" * 4096])
dtypes = st.sampled_from(["bfloat16", "float32", "uint8", "float4_e2m1fn_x2", "complex64", "", "no such"])
moments = st.builds(Moment, iteration=index, micro_batch=index, call=index)
keys = st.builds(Key, quant_type=names, rank=index, tensor_name=names, layer=st.none() | index, module=names)
offsets = st.sampled_from([0, 64, 4096, 8192, ARENA_NBYTES - 8, ARENA_NBYTES]) | big
sizes = st.sampled_from([0, 1, 8, 4096, 300 << 10, ARENA_NBYTES - 4096]) | big
shapes = st.sampled_from([(), (0,), (4,), (8,), (4096,), (2, 2), (0, 2**31 - 1), (150 << 10,), (300 << 10,)])
descriptors = st.builds(
    Descriptor,
    st.integers(1, 50) | big,
    offsets,
    sizes,
    st.integers(0, 3),
    shapes | st.lists(index, max_size=16).map(tuple),
    moments,
    metadata=st.sampled_from([b"", b"{}", b"nothing", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 4096]),
    part=st.none() | st.builds(Part, big, big, big),
)
# Of a record of 16 bytes that any of them may begin, go on with, end or give up.
parts = st.builds(
    lambda sequence, record, first, nbytes: Descriptor(
        sequence, 4096, nbytes, 0, (8,), Moment(), part=Part(record, first, 16)
    ),
    st.integers(1, 50), st.integers(0, 9), st.sampled_from([0, 8, 16]), st.sampled_from([0, 8, 16]),
)  # fmt: skip
whole = st.builds(
    lambda sequence, n: Descriptor(sequence, 4096, 8, 0, (4,), Moment(iteration=n)), st.integers(1, 50), index
)
rows = st.builds(DropRow, st.integers(0, 3), st.integers(0, 9), big, big, index, index)
messages = st.one_of(
    st.builds(
        lambda client, **rest: Hello(client=client, arena_nbytes=ARENA_NBYTES, **rest),
        st.binary(min_size=16, max_size=16),
        protocol=st.sampled_from([0, 1, 1, 1, 2, 2**31]),
        connection=index,
        rank=index,
    ),
    st.builds(Define, id=st.integers(0, 3), key=keys, dtype=dtypes, attributes=st.dictionaries(names, big, max_size=2)),
    st.builds(Put, st.lists(descriptors | whole | parts, max_size=8)),
    st.builds(Put, st.lists(whole, min_size=MAX_BATCH, max_size=MAX_BATCH)),
    st.builds(Drops, st.lists(rows, max_size=3)),
    st.builds(Flush, big, big),
    st.just(Ping()),
    st.just(Bye()),
    st.builds(Stats, st.none() | names),
    st.builds(Control, names, st.none() | names),
)  # fmt: skip


def framed(frame: bytes) -> bytes:
    return struct.pack("!i", len(frame)) + frame


raw = st.one_of(
    st.binary(max_size=64).map(framed),
    st.binary(max_size=64),
    st.integers(-(2**31), 2**31 - 1).map(lambda n: struct.pack("!i", n)),
    messages.map(lambda message: framed(encode(message))[:-1]),
)
pieces = st.lists(messages.map(lambda message: framed(encode(message)[:MAX_FRAME_NBYTES])) | raw, max_size=12)
first_bytes = st.sampled_from([ARENA_BYTE] * 6 + [TOOL_BYTE, b"", b"Z", ARENA_BYTE * 2])


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="capd-f-", dir="/tmp") as directory:
        started = DaemonProcess(Path(directory) / "store", Path(directory) / "s.sock")
        yield started
        assert started.stop() == 0, started.text()[-4000:]
        assert "Traceback" not in started.text()
        for run in (Path(directory) / "store").glob("*.zarr"):
            assert json.loads(capd("verify", str(run), "--json").stdout)["ok"]


@contextlib.contextmanager
def served(daemon: DaemonProcess) -> Iterator[None]:
    """An honest rank is served before and after; memory is bounded, and no socket is kept."""
    rank = Rank(daemon.path, run_id="honest")
    try:
        rank.connect()
        rank.put(1)
        rank.expect_acks(1)
        before = held(daemon, "socket:")
        yield
        rank.put(2)
        rank.expect_acks(2)
        wait_for(lambda: held(daemon, "socket:") <= before, f"as many sockets as before: {before}")
        wait_for(lambda: held(daemon, "/memfd:") < 3 * MAX_LOST, "the memory of those who left is let go of")
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        anonymous = int(status.partition("RssAnon:")[2].split()[0]) << 10
        assert anonymous < ANON_NBYTES
    finally:
        rank.close()


def held(daemon: DaemonProcess, kind: str) -> int:
    """Descriptors of this kind that the daemon has open."""
    return sum(name.startswith(kind) for name in daemon.open_links())


def converse(daemon: DaemonProcess, first: bytes, sent: list[bytes], opening: bool) -> None:
    """Say it all, taking whatever is answered; the connection may end at any moment."""
    fd = make_memfd()
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    try:
        sock.connect(str(daemon.path))
        if first:
            socket.send_fds(sock, [first], [fd] if first == ARENA_BYTE else [])
        if opening:  # most get in, so that what follows is heard
            hello = Hello(
                protocol=2,
                client=os.urandom(16),
                connection=1,
                run_id="fuzz",
                rank=0,
                arena_nbytes=ARENA_NBYTES,
            )
            key = Key(quant_type="bf16", rank=0, tensor_name="x")
            sock.sendall(framed(encode(hello)) + framed(encode(Define(id=0, key=key, dtype="bfloat16"))))
        for piece in sent:
            sock.sendall(piece)
            while select.select([sock], [], [], 0)[0] and sock.recv(1 << 16):
                pass
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        sock.close()
        os.close(fd)


def fuzz(examples: int) -> Callable[[DaemonProcess], None]:
    @settings(max_examples=examples)
    @given(first=first_bytes, sent=pieces, opening=st.sampled_from([True, True, True, False]))
    def test(daemon: DaemonProcess, first: bytes, sent: list[bytes], opening: bool) -> None:
        converse(daemon, first, sent, opening)
        assert daemon.process.poll() is None, daemon.text()[-4000:]

    return test  # type: ignore[no-any-return]


def test_any_connection_ends_alone(daemon: DaemonProcess) -> None:
    with served(daemon):
        fuzz(80)(daemon)


@pytest.mark.fault
@pytest.mark.timeout(1800)
def test_any_connection_ends_alone_in_many_examples(daemon: DaemonProcess) -> None:
    with served(daemon):
        fuzz(EXAMPLES)(daemon)
