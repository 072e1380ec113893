"""How far a rank is: its counters may be ahead of its captures."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from capd.server.pipeline.jobs import RecordJob
from capd.server.rank.arena import Arena
from capd.server.rank.rank import RankSession
from capd.server.rank.session import Session
from capd.server.rank.steering import RunSteering
from capd_client.protocol.counter_page import COUNTER_OFFERED, COUNTER_STEPS, PAGE_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor, Hello, Put
from tests.kit.client.memory import SEALS, memfd, write

NBYTES = 1 << 16
DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="uint8")


class Rank:
    """A rank whose page a test writes. jobs: its captures in the lanes."""

    def __init__(self) -> None:
        self.fd = memfd(NBYTES, seals=SEALS)
        self.jobs: list[RecordJob] = []
        hello = Hello(protocol=2, client=b"c" * 16, connection=1, rank=0, arena_nbytes=NBYTES)
        arena = Arena(self.fd, NBYTES)
        self.session = RankSession(
            Session(b"c" * 16, "run"), hello, arena, self._submit, lambda *_: None, 0, RunSteering()
        )
        assert self.session.connect(hello, arena, None) is None
        assert self.session.apply(1, lambda session: session.define(DEFINE, 10))
        self._sequence = 0

    def _submit(self, *jobs: RecordJob) -> None:
        self.jobs += jobs

    def begin(self, iteration: int, *, offered: int) -> None:
        """Write the page: the iteration that the rank is in, and what it has captured so far."""
        write(self.fd, struct.pack("Q", iteration + 1), 8 * COUNTER_STEPS)
        write(self.fd, struct.pack("Q", offered), 8 * COUNTER_OFFERED)

    def send(self, iteration: int) -> None:
        self._sequence += 1
        moment = Moment(iteration=iteration, time_ns=10**18)
        item = Descriptor(self._sequence, PAGE_NBYTES, 1, 0, (1,), moment, device="cpu")
        self.session.put(1, Put([item]))

    def close(self) -> None:
        self.session.release()
        os.close(self.fd)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_a_rank_without_captures_on_their_way_is_where_its_page_says(rank: Rank) -> None:
    assert rank.session.reached == -1
    rank.begin(7, offered=1)
    rank.send(5)
    rank.session.held(1)
    assert rank.session.reached == 7


def test_captures_in_the_lanes_hold_it_back(rank: Rank) -> None:
    rank.begin(7, offered=3)
    for iteration in (3, 4, 5):
        rank.send(iteration)
    assert rank.session.reached == 3
    rank.session.held(1)
    rank.session.committed([2])
    assert rank.session.reached == 5


def test_captures_that_it_has_not_sent_hold_it_back(rank: Rank) -> None:
    rank.begin(7, offered=2)
    assert rank.session.reached == -1
    rank.send(4)
    rank.session.held(1)
    assert rank.session.reached == 4
    rank.send(6)
    rank.session.held(2)
    assert rank.session.reached == 7


def test_a_rank_that_has_left_is_where_its_captures_in_the_lanes_are(rank: Rank) -> None:
    rank.begin(7, offered=1)
    rank.send(4)
    rank.session.end(1)
    assert rank.session.reached == 4
    rank.session.held(1)
    assert rank.session.reached == 7
