"""Samples and newest records of a real daemon with real ranks: while it captures, when it is killed, and back."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from capd.live.records import NewestRecords
from capd.live.sampler import Sampler
from capd.live.state import LiveSample, RankState
from capd_client.protocol.counter_page import COUNTER_STEPS
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for


@pytest.fixture
def made() -> Iterator[list[DaemonProcess]]:
    with daemons() as found:
        yield found


def started(made: list[DaemonProcess], store: Path, endpoint: Path) -> DaemonProcess:
    made.append(DaemonProcess(store, endpoint))
    return made[-1]


def at_iteration(rank: Rank, iteration: int) -> None:
    rank.memory[8 * COUNTER_STEPS : 8 * COUNTER_STEPS + 8] = struct.pack("Q", iteration + 1)


def ranks_in(sample: LiveSample) -> tuple[RankState, ...]:
    assert sample.node is not None
    return sample.node.runs[0].ranks if sample.node.runs else ()


def test_a_sampler_follows_ranks_and_survives_the_daemon(
    made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    daemon = started(made, tmp_path / "store", runtime_dir / "s.sock")
    sampler = Sampler(daemon.path)
    assert sampler.sample().node is not None
    one, two = Rank(daemon.path, rank=0), Rank(daemon.path, rank=1)
    for rank in (one, two):
        rank.connect()
        rank.put(0, 1, 2)
        rank.expect_acks(0, 1, 2)
    one.count(offered=5, arena_full=2)
    two.count(offered=3)
    at_iteration(one, 9)
    at_iteration(two, 7)
    first, second = ranks_in(sampler.sample())

    assert (first.rank, first.iteration, first.behind) == (0, 9, 0)
    assert (second.rank, second.iteration, second.behind) == (1, 7, 2)
    assert (first.offered, first.committed, first.dropped) == (5, 3, {"arena_full": 2})
    assert (first.arena_bytes, first.arena_used) == (1 << 20, 0)

    daemon.stop(signal.SIGKILL)
    gone = sampler.sample()
    assert gone.gone
    assert ranks_in(gone) == (first, second)
    again = started(made, tmp_path / "store", daemon.path)
    assert not sampler.sample().gone
    for rank in (one, two):
        rank.connect()
        rank.put(3)
        rank.expect_acks(3)
    assert [rank.committed for rank in ranks_in(sampler.sample())] == [4, 4]
    one.bye()
    two.bye()
    wait_for(lambda: {rank.state for rank in ranks_in(sampler.sample())} == {"ended"}, "both ranks left")
    # The arenas are released, and the last iterations stay.
    assert [rank.iteration for rank in ranks_in(sampler.sample())] == [9, 7]
    texts = [event.text for event in sampler.events]
    assert any("was started again" in text for text in texts)
    assert "2 captures dropped, arena_full" in texts
    sampler.close()
    one.close()
    two.close()
    assert again.stop() == 0


def test_captures_in_work_show_as_used_arena_and_as_lag(
    made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPD_FAILPOINTS", "log.before_write=hang")
    daemon = started(made, tmp_path / "store", runtime_dir / "s.sock")
    rank = Rank(daemon.path)
    rank.connect()
    sampler = Sampler(daemon.path)
    [here] = ranks_in(sampler.sample())
    assert (here.iteration, here.arena_used) == (None, 0)

    rank.put(*range(50))
    wait_for(lambda: ranks_in(sampler.sample())[0].arena_used == 50 * 8, "all captures wait in the arena")
    assert sampler.last.node is not None
    before = sampler.last.node.oldest_s
    wait_for(lambda: (node := sampler.sample().node) and node.oldest_s > before, "the oldest one grows older")
    sampler.close()
    rank.close()


def test_new_records_are_listed_while_the_daemon_writes_them(
    made: list[DaemonProcess], runtime_dir: Path, tmp_path: Path
) -> None:
    daemon = started(made, tmp_path / "store", runtime_dir / "s.sock")
    rank = Rank(daemon.path)
    rank.connect()
    rank.put(0, 1)
    rank.expect_acks(0, 1)
    newest = NewestRecords(tmp_path / "store" / "run.zarr", "n")
    wait_for(lambda: len(newest.look()) == 2, "the first records")
    rank.put(2)
    rank.expect_acks(2)
    wait_for(lambda: len(newest.look()) == 3, "the next record")

    found = newest.records[0]
    assert sorted(record.moment.iteration for record in newest.records) == [0, 1, 2]
    assert found.stats is not None
    assert found.stats.count == 4
    # No reader keeps the catalog open: the daemon leaves one file.
    rank.bye()
    rank.close()
    assert daemon.stop() == 0
    node = tmp_path / "store" / "run.zarr" / ".capd" / "node=n"
    assert [place.name for place in node.glob("catalog.sqlite*")] == ["catalog.sqlite"]
