"""Ranks that want only statistics kept, or computed them themselves: what a real daemon believes and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import capd
from capd.store.format.frames import StatsRow
from capd.store.format.packed_statistics import pack
from capd.store.format.statistics import public, summarise
from capd.store.read.series import Record, Series
from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor, Put
from capd_client.protocol.statistics_row import ROW_NBYTES
from tests.kit.daemon import DEFINE, DaemonProcess, Rank, wait_for

BITS = np.array([[0x3F80, 0x4000], [0xC040, 0x0000]], "u2")  # 1, 2, -3, 0 as bfloat16
COMPUTED = summarise(BITS, "bfloat16")
HANDED = StatsRow(
    4, 0, 0, 0, -7.0, 9.0, 9.0, 5.0, 200.0, [130, 4]
)  # tells itself from what the daemon computes
ROW_OFFSET = PAGE_NBYTES + (64 << 10)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    started = DaemonProcess(tmp_path / "store", tmp_path / "s.sock")
    try:
        yield started
        assert started.stop() == 0, started.text()
        assert "Traceback" not in started.text()
    finally:
        started.process.kill()
        started.process.wait()


@pytest.fixture
def rank(daemon: DaemonProcess) -> Iterator[Rank]:
    rank = Rank(daemon.path)
    rank.connect()
    yield rank
    rank.close()


def put(
    rank: Rank,
    sequence: int,
    row: StatsRow | None = None,
    *,
    payload: bool = True,
    shape: tuple[int, ...] = (2, 2),
    statistics: bool = False,
) -> None:
    """Describe BITS, a statistics row, or both; `sequence` is also the iteration."""
    offset, row_offset = PAGE_NBYTES + 64 * sequence, ROW_OFFSET + (ROW_NBYTES + 8) * sequence
    nbytes = BITS.nbytes if payload or row is None else 0
    rank.memory[offset : offset + nbytes] = BITS.tobytes()[:nbytes]
    if row is not None:
        rank.memory[row_offset : row_offset + ROW_NBYTES] = pack(row)
    rank.send(
        Put(
            [
                Descriptor(
                    sequence, offset, nbytes, DEFINE.id, shape, Moment(iteration=sequence),
                    row_offset=None if row is None else row_offset, payload=payload,
                    statistics=statistics,
                )
            ]
        )
    )  # fmt: skip


def stored(daemon: DaemonProcess) -> dict[int, tuple[Series, int, Record]]:
    """Series, index and record by iteration."""
    everything = capd.open(daemon.store / "run.zarr").series
    return {r.iteration: (series, i, r) for series in everything for i, r in enumerate(series.records)}


def test_a_row_that_the_rank_computed_is_kept_with_and_without_the_tensor(
    daemon: DaemonProcess, rank: Rank
) -> None:
    put(rank, 1, HANDED)
    put(rank, 2, HANDED, payload=False)
    put(rank, 3, payload=False)
    put(rank, 4)
    rank.expect_acks(1, 2, 3, 4)

    found = stored(daemon)
    assert [found[n][2].stats for n in (1, 2, 3, 4)] == [
        public(s) for s in (HANDED, HANDED, COMPUTED, COMPUTED)
    ]
    assert [found[n][0].kept for n in (1, 2, 3, 4)] == ["tensor", "statistics", "statistics", "tensor"]
    assert {record.shape for _, _, record in found.values()} == {(2, 2)}
    assert all(np.array_equal(found[n][0].numpy(found[n][1]), BITS) for n in (1, 4))


def test_a_row_that_cannot_be_right_is_ignored_or_refused(daemon: DaemonProcess, rank: Rank) -> None:
    wrong = StatsRow(5, 0, 0, 0, -7.0, 9.0, 9.0, 5.0, 200.0, [130, 5])  # of five elements
    put(rank, 1, wrong)  # the bytes are there: they tell
    put(rank, 2, wrong, payload=False)
    put(rank, 3, payload=False)
    rank.expect_acks(1, 3)
    rank.listen_until(lambda: 2 in rank.nacked, "NACK of 2")

    assert rank.nacked[2][0] is DropReason.BAD_DESCRIPTOR
    assert "contradicts the tensor" in rank.nacked[2][1]
    assert stored(daemon)[1][2].stats == public(COMPUTED)


def test_what_the_rank_changes_behind_its_put_changes_nothing(daemon: DaemonProcess, rank: Rank) -> None:
    put(rank, 1, HANDED, payload=False)
    rank.expect_acks(1)
    put(rank, 1, StatsRow(4, 4), payload=False)  # a repetition is answered from what is known
    rank.acked.clear()
    rank.expect_acks(1)

    assert stored(daemon)[1][2].stats == public(HANDED)
    assert daemon.run_stats("run")["records"] == 1


def test_where_statistics_are_switched_off_those_that_a_rank_asks_for_are_computed(tmp_path: Path) -> None:
    (tmp_path / "capd.toml").write_text("[daemon]\nstatistics = false\n")
    daemon = DaemonProcess(tmp_path / "store", tmp_path / "s.sock", "--config", str(tmp_path / "capd.toml"))
    rank = Rank(daemon.path)
    try:
        rank.connect()
        put(rank, 1, payload=False)
        put(rank, 2, HANDED)
        put(rank, 3)
        put(rank, 4, statistics=True)
        rank.expect_acks(1, 2, 3, 4)
        rank.bye()
        wait_for(lambda: daemon.run_stats("run").get("records") == 4, "all counted")
    finally:
        rank.close()
        daemon.stop()

    found = stored(daemon)
    assert [found[n][2].stats for n in (1, 2, 4)] == [public(s) for s in (COMPUTED, HANDED, COMPUTED)]
    assert found[3][2]._stats is None  # it computes them when it is asked
    assert found[2][2].stats == public(HANDED)


def test_acknowledged_statistics_outlive_a_killed_daemon(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "store", tmp_path / "s.sock")
    rank = Rank(daemon.path)
    try:
        rank.connect()
        for sequence in range(1, 21):
            put(rank, sequence, HANDED if sequence % 2 else None, payload=False)
        rank.expect_acks(*range(1, 21))
        daemon.stop(9)
        daemon = DaemonProcess(tmp_path / "store", tmp_path / "s.sock")
        rank.connect()
        put(rank, 20, payload=False)  # it has no word on the last one, and asks again
        put(rank, 21, HANDED, payload=False)
        rank.acked.clear()
        rank.expect_acks(20, 21)
        rank.bye()
    finally:
        rank.close()
        assert daemon.stop() == 0

    found = {n: record.stats for n, (_, _, record) in stored(daemon).items()}
    assert found == {n: public(HANDED if n % 2 else COMPUTED) for n in range(1, 22)}
