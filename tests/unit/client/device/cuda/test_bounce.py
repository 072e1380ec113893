"""Bytes that go by way of two page-locked buffers: all of them, in order, the next part under way meanwhile."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capd_client.device.cuda.bounce import Bounce
from capd_client.process.log import RateLimitedLog

NBYTES = 64


class Stream:
    """A device's stream: it copies in order, in a thread of its own, and takes `takes_s` for each copy."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.log: list[str] = []
        self.takes_s = takes_s
        self._pool = ThreadPoolExecutor(1)

    def fetch(self, source: torch.Tensor, buffer: torch.Tensor) -> Future[None]:
        self.log.append(f"fetch {source.storage_offset()}")
        return self._pool.submit(self._copy, source, buffer)

    def _copy(self, source: torch.Tensor, buffer: torch.Tensor) -> None:
        time.sleep(self.takes_s)
        buffer.copy_(source)

    def wait(self, event: Future[None]) -> None:
        self.log.append("wait")
        event.result(30)

    def close(self) -> None:
        self._pool.shutdown()


class Memory:
    """Page-locked memory as a test wants it: `left` buffers, then none."""

    def __init__(self, left: int = 2) -> None:
        self.left = left
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.asked.append(nbytes)
        if len(self.asked) > self.left:
            raise RuntimeError("CUDA error: out of memory")
        return torch.full((nbytes,), 255, dtype=torch.uint8)


def a_bounce(memory: Memory) -> Bounce:
    return Bounce(RateLimitedLog(), nbytes=NBYTES, allocate=memory.allocate)


@given(st.integers(0, 5 * NBYTES + 3), st.integers(0, 9))
def test_every_byte_arrives_and_none_beside_it(nbytes: int, start: int) -> None:
    stream, bounce = Stream(), a_bounce(Memory())
    source = torch.randint(0, 256, (start + nbytes,), dtype=torch.uint8)[start:]
    arena = torch.zeros(start + nbytes + 8, dtype=torch.uint8)
    try:
        assert bounce.bring(source, arena[start : start + nbytes], stream.fetch, stream.wait)
        assert torch.equal(arena[start : start + nbytes], source)
        assert not arena[:start].any()
        assert not arena[start + nbytes :].any()
    finally:
        stream.close()


def test_one_part_is_moved_while_the_next_is_on_its_way() -> None:
    stream, memory = Stream(takes_s=0.01), Memory()
    source, host = torch.arange(4 * NBYTES).to(torch.uint8), torch.zeros(4 * NBYTES, dtype=torch.uint8)
    bounce = a_bounce(memory)
    for _ in range(2):
        host.zero_()
        assert bounce.bring(source, host, stream.fetch, stream.wait)
        assert torch.equal(host, source)
    stream.close()

    one = ["fetch 0", "fetch 64", "wait", "fetch 128", "wait", "fetch 192", "wait", "wait"]
    assert stream.log == one * 2
    assert memory.asked == [NBYTES, NBYTES]  # made once


def test_without_page_locked_memory_nothing_is_copied_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream, memory = Stream(), Memory(left=1)
    host = torch.zeros(10, dtype=torch.uint8)
    bounce = a_bounce(memory)
    for _ in range(3):
        assert not bounce.bring(torch.ones(10, dtype=torch.uint8), host, stream.fetch, stream.wait)
    stream.close()

    assert not host.any()
    assert stream.log == []
    assert len(memory.asked) == 2  # not asked for again
    assert [record.getMessage() for record in caplog.records] == [
        "capd: no page-locked memory, copies from devices hold up the job: CUDA error: out of memory"
    ]


def test_buffers_that_were_let_go_are_made_again_at_need() -> None:
    stream, memory = Stream(), Memory(left=4)
    source, host = torch.ones(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    bounce = a_bounce(memory)
    bounce.let_go()
    assert memory.asked == []
    assert bounce.bring(source, host, stream.fetch, stream.wait)
    bounce.let_go()
    host.zero_()
    assert bounce.bring(source, host, stream.fetch, stream.wait)
    stream.close()
    assert torch.equal(host, source)
    assert len(memory.asked) == 4


@pytest.mark.parametrize("where", ["fetch", "wait"])
def test_after_an_error_no_buffer_is_used_again_or_freed(where: str) -> None:
    """Not every error stops the device: a copy that was issued may still be written."""
    stream, memory = Stream(), Memory()
    bounce, failing = a_bounce(memory), threading.Event()

    def fetch(source: torch.Tensor, buffer: torch.Tensor) -> Future[None]:
        if failing.is_set() and where == "fetch" and source.storage_offset():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return stream.fetch(source, buffer)

    def wait(event: Future[None]) -> None:
        if failing.is_set() and where == "wait":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        stream.wait(event)

    source, host = torch.ones(2 * NBYTES, dtype=torch.uint8), torch.zeros(2 * NBYTES, dtype=torch.uint8)
    assert bounce.bring(source, host, fetch, wait)
    buffers = list(bounce._buffers)
    failing.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bounce.bring(source, host, fetch, wait)
    failing.clear()
    bounce.let_go()
    stream.close()

    assert bounce._buffers == buffers
    assert not bounce.bring(source, host, fetch, wait)


def test_the_buffers_are_torchs_own_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []
    empty = torch.empty

    def counted(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append((nbytes, pin_memory))
        return empty(nbytes, dtype=dtype, pin_memory=pin_memory)

    monkeypatch.setattr(torch, "empty", counted)
    stream, bounce = Stream(), Bounce(RateLimitedLog())
    source, host = torch.ones(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    done = bounce.bring(source, host, stream.fetch, stream.wait)
    stream.close()

    assert set(asked) == {(8 << 20, True)}
    assert done is torch.cuda.is_available()  # without a GPU torch has none
    assert torch.equal(host, source) is done
