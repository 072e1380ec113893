"""What one rank can make the daemon hold in its memory."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from capd.server.pipeline.jobs import RecordJob
from capd.server.rank.arena import Arena
from capd.server.rank.rank import MAX_IN_WORK_NBYTES, RankSession
from capd.server.rank.session import Session
from capd.server.rank.steering import RunSteering
from capd_client.protocol.counter_page import PAGE_NBYTES
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import (
    MAX_BATCH,
    MAX_METADATA_NBYTES,
    Define,
    Descriptor,
    Hello,
    Put,
    decode_client,
    encode,
)
from capd_client.protocol.statistics_row import ROW_NBYTES, ROW_VALUES
from tests.kit.client.memory import SEALS, memfd, write
from tests.kit.tiers import rows

ARENA_NBYTES = 1 << 20
DEFINE = Define(id=0, key=Key(quant_type="bf16", rank=0, tensor_name="x"), dtype="uint8")
LONG = '{"a":"\N{GRINNING FACE}'.encode().ljust(MAX_METADATA_NBYTES - 2, b"x") + b'"}'


@pytest.fixture
def jobs() -> list[RecordJob]:
    """What waits for the pipeline, which does nothing here."""
    return []


@pytest.fixture
def rank(jobs: list[RecordJob]) -> Iterator[RankSession]:
    fd = memfd(ARENA_NBYTES, seals=SEALS)
    write(fd, _row().tobytes(), PAGE_NBYTES)
    hello = Hello(protocol=2, client=b"c" * 16, connection=1, rank=0, arena_nbytes=ARENA_NBYTES)
    arena = Arena(fd, ARENA_NBYTES)
    os.close(fd)
    made = RankSession(
        Session(b"c" * 16, "run"),
        hello,
        arena,
        lambda *new: jobs.extend(new),
        lambda *_: None,
        0,
        RunSteering(),
    )
    assert made.connect(hello, arena, None) is None
    assert made.apply(1, lambda session: session.define(DEFINE, 10))
    yield made
    made.release()


def _row() -> np.ndarray:
    """A consistent row with a large number in every bin."""
    row = np.zeros(ROW_VALUES)
    row[9:265] = np.arange(256) + 1000
    row[:9] = row[9:].sum(), row[264], 0, 0, 0, 1, 1, 0, 0
    return row


def flood(rank: RankSession, *, metadata: bytes = b"", row: bool = False) -> None:
    """Send captures for as long as the daemon reads."""
    first = 1
    while rank.wait_for_room(0):
        items = [
            Descriptor(
                first + at, PAGE_NBYTES + ROW_NBYTES, 0 if row else 1, 0, (int(_row()[0]),) if row else (1,),
                Moment(iteration=10**6 + at, time_ns=10**18 + at), device="cuda:0", metadata=metadata,
                row_offset=PAGE_NBYTES if row else None, payload=not row,
            )
            for at in range(MAX_BATCH)
        ]  # fmt: skip
        frame = encode(Put(items))
        del items
        message = decode_client(frame)
        assert isinstance(message, Put)
        rank.put(1, message)
        first += MAX_BATCH


@pytest.mark.parametrize("metadata", rows([b"", LONG], [LONG]), ids=["plain", "metadata"])
@pytest.mark.parametrize("row", rows([False, True], [True]), ids=["bytes", "row"])
def test_what_waits_of_one_rank_takes_bounded_memory(
    rank: RankSession, jobs: list[RecordJob], metadata: bytes, row: bool
) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        flood(rank, metadata=metadata, row=row)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(jobs) > 2000  # a rank that is only quick is not held back by less
    assert not rank.session.refused_counts
    assert held < MAX_IN_WORK_NBYTES * 1.1
    for job in jobs:
        job.sink.committed([job.sequence])
    assert rank.session.in_work_nbytes == 0
    assert rank.wait_for_room(0)
