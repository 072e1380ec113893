"""SIGKILL to the daemon at random moments, in every phase of its life; acknowledged records lost must be 0."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.kit import figures
from tests.fault.kit.rounds import kill_rounds
from tests.fault.kit.site import Site

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

STORES, KILLS_PER_STORE = 10, 10
RECOVERY_NBYTES = 300 << 20
INTERRUPTED_STARTS = 25


@pytest.fixture
def sites(tmp_path: Path, runtime_dir: Path) -> Iterator[list[Site]]:
    """Room for sites; all are closed at the end."""
    opened: list[Site] = []
    yield opened
    for site in opened:
        site.close()


@pytest.mark.parametrize("durability", ["buffered", "durable"])
def test_rounds_of_kills_lose_nothing(
    durability: str, sites: list[Site], tmp_path: Path, runtime_dir: Path
) -> None:
    generator = random.Random(f"kills {durability}")
    kills = acked = unacked = 0
    slowest = 0.0
    judged: Counter[str] = Counter()
    for number in range(STORES):
        site = Site(tmp_path / f"{durability}-{number}", runtime_dir, options=("--durability", durability))
        sites.append(site)
        ranks = [site.rank(0), site.rank(1)]
        slowest = max(slowest, kill_rounds(site, ranks, KILLS_PER_STORE, generator))
        kills += KILLS_PER_STORE
        unacked = max(unacked, sum(len(rank.in_flight) for rank in ranks))
        site.report()
        acked += site.finish()["acked"]
        judged.update(site.judged)
    figures.note(
        f"SIGKILL {durability}", kills=kills, acked=acked, **judged,
        max_unanswered=unacked, slowest_start_s=round(slowest, 2),
    )  # fmt: skip


def test_recovery_that_is_killed_again_and_again_converges(site: Site) -> None:
    generator = random.Random(49)
    rank = site.rank()
    assert site.start()
    rank.connect()
    rank.offer(200)
    rank.drain()
    site.seal()
    rank.offer(200)
    rank.drain()
    site.kill()
    before = site.report()
    for _ in range(INTERRUPTED_STARTS):
        site.start_unwatched()
        time.sleep(generator.uniform(0.15, 0.6))  # interpreter start, recovery, listening
        site.kill()
    assert site.report()["found"] == before["found"]
    report = site.finish()
    figures.note("recovery killed", kills=INTERRUPTED_STARTS, acked=report["acked"], **site.judged)


def test_time_to_take_up_what_a_killed_daemon_left(site: Site) -> None:
    rank = site.rank()
    assert site.start()
    rank.connect()
    while sum(path.stat().st_size for path in site.run.glob(".capd/*/spool/*")) < RECOVERY_NBYTES:
        rank.offer(24)
    rank.drain()
    site.kill()
    nbytes = sum(path.stat().st_size for path in site.run.glob(".capd/*/spool/*"))
    began = time.monotonic()
    assert site.start()
    rank.connect()  # WELCOME comes when the run is recovered
    took = time.monotonic() - began
    rank.bye()
    assert site.stop() == 0
    site.report()
    figures.note(
        "recovery",
        spool_mib=nbytes >> 20,
        seconds_with_start=round(took, 2),
        s_per_gib=round(took * (1 << 30) / nbytes, 2),
    )
