"""A quota over restarts of the daemon, exact to one record; what the rank and `capd stats` are told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import capd
from capd_client.protocol.counter_page import PAGE_NBYTES, DropReason
from capd_client.protocol.key import Moment
from capd_client.protocol.messages import Descriptor, Put
from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.metrics.scrape import address_of, get
from tests.kit.store.cli import run_capd

RECORD_NBYTES = 512 << 10
LIMIT = 12 * RECORD_NBYTES + RECORD_NBYTES // 2

Serve = Callable[[], DaemonProcess]


@pytest.fixture
def serve(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("CAPD_RUN_MAX", str(LIMIT))
    monkeypatch.setenv("CAPD_CODEC", "none")
    (tmp_path / "capd.toml").write_text('[quota]\nrun_max = "1TB"\npolicy = "drop"\n')
    with daemons() as made:

        def start() -> DaemonProcess:
            config = ("--config", str(tmp_path / "capd.toml"), "--metrics", "127.0.0.1:0")
            made.append(DaemonProcess(tmp_path / "store", runtime_dir / "s.sock", *config))
            return made[-1]

        yield start


@pytest.fixture
def rank(runtime_dir: Path) -> Iterator[Rank]:
    made = Rank(runtime_dir / "s.sock")
    yield made
    made.close()


def offer(rank: Rank, *sequences: int) -> None:
    """Offer records one by one, and wait for the outcome of each."""
    for n in sequences:
        rank.memory[PAGE_NBYTES : PAGE_NBYTES + RECORD_NBYTES] = os.urandom(RECORD_NBYTES)
        shape = (RECORD_NBYTES // 2,)
        rank.send(Put([Descriptor(n, PAGE_NBYTES, RECORD_NBYTES, 0, shape, Moment(iteration=n))]))
        rank.listen_until(lambda n=n: n in rank.acked or n in rank.nacked, f"outcome of {n}")  # type: ignore[misc]


def test_a_quota_holds_over_three_restarts_to_one_record(
    tmp_path: Path, runtime_dir: Path, serve: Serve, rank: Rank
) -> None:
    for start in (0, 4, 8):
        daemon = serve()
        rank.connect()
        offer(rank, *range(start, start + 4))
        rank.disconnect()
        # Killed at any time, the catalog lacks the last records, and the frames have them.
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
    assert not rank.nacked

    daemon = serve()
    rank.connect()
    offer(rank, 12, 13)
    assert rank.acked == set(range(12))
    assert {reason for reason, _ in rank.nacked.values()} == {DropReason.QUOTA}
    said = rank.nacked[12][1]
    assert said.startswith("run_max refuses a record of 0.5 MB: run run holds 6.3 MB of the 6.6 MB")
    rank.count(offered=14, quota=2)
    [use] = daemon.run_stats("run")["quotas"]
    ratio = "capd_run_quota_ratio", frozenset({("run_id", "run")})
    wait_for(
        lambda: get(address_of(daemon)).samples.get(ratio) == use["used"] / LIMIT,
        "the page has the use of the quota",
    )
    stats = run_capd("stats", tmp_path / "store", CAPD_ENDPOINT=f"unix:{runtime_dir / 's.sock'}")
    assert "run_max: 6.0 MiB of 6.2 MiB (96 %)" in stats.out
    assert "2 quota" in stats.out
    assert "raise CAPD_RUN_MAX" in " ".join(stats.out.split())
    rank.bye()
    assert daemon.stop() == 0
    [series] = capd.open(tmp_path / "store" / "run.zarr").find()
    assert [record.iteration for record in series.records] == list(range(12))
    [use] = [use for use in daemon.text().splitlines() if "has reached its limit" in use]
    assert "run_max in [quota]" in use
