"""Power loss: file systems on images are shut down without a flush under a daemon at work, and mounted again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.kit import figures
from tests.fault.kit.file_systems import Disk, mounted_disk
from tests.fault.kit.load import Gone, LoadRank, small_capture
from tests.fault.kit.site import Site

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

LOSSES = 12
LATE_LOSSES = 2
JOURNAL_S = (6.0, 8.0)  # ext4 commits its journal every 5 s: names without data

# Until the next start: series that were claimed, and hold nothing acknowledged yet, can have empty documents.
# And the disk that dies can keep a part of what is then refused, because the rest of it failed.
NOT_YET = "unreadable"
HALF_SYNCED = "refused"

MakeSite = Callable[[str, str], tuple[Site, Disk]]


@pytest.fixture
def on_disk(tmp_path: Path, runtime_dir: Path) -> Iterator[MakeSite]:
    """`on_disk(file system, durability)` → a site whose store lies on a disk of its own; its log lies outside."""
    opened: list[tuple[Site, object]] = []

    def make(kind: str, durability: str) -> tuple[Site, Disk]:
        context = mounted_disk(kind, tmp_path)
        disk = context.__enter__()
        options = ("--durability", durability)
        site = Site(disk.directory, runtime_dir, options=options, log=tmp_path / "expected.jsonl")
        opened.append((site, context))
        return site, disk

    yield make
    for site, context in opened:
        site.close()
        context.__exit__(None, None, None)  # type: ignore[attr-defined]


def load(site: Site, rank: LoadRank, seconds: float) -> None:
    """Capture and seal until the time is over, or the daemon or its disk is gone."""
    refused = len(rank.refusals)
    until = time.monotonic() + seconds
    try:
        rank.connect()
        while time.monotonic() < until and len(rank.refusals) == refused:
            rank.offer(3)
            if rank.next % 30 < 3:
                site.seal()
    except Gone:
        pass


def lose_power(site: Site, disk: Disk, rank: LoadRank, after_s: float, load_s: float) -> int:
    """Cut the power at a moment; returns the zero-length files that the file system then has."""
    assert site.start(), site.says()
    timer = threading.Timer(after_s, disk.cut_power)
    timer.start()
    load(site, rank, load_s)
    timer.join()
    site.kill()
    disk.unmount()
    disk.mount()
    return sum(path.is_file() and not path.stat().st_size for path in site.run.rglob("*"))


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_durable_records_survive_power_loss_at_random_moments(kind: str, on_disk: MakeSite) -> None:
    generator = random.Random(f"power {kind}")
    site, disk = on_disk(kind, "durable")
    rank = site.rank(captures=small_capture)
    for _ in range(LOSSES):
        lose_power(site, disk, rank, generator.uniform(0.05, 1.2), 30.0)
        site.report(NOT_YET, HALF_SYNCED)
    acked = site.finish((), HALF_SYNCED)["acked"]
    figures.note(f"power loss {kind}", losses=LOSSES, acked=acked, **site.judged)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_durable_records_survive_a_journal_that_ran_ahead_of_the_data(kind: str, on_disk: MakeSite) -> None:
    generator = random.Random(f"journal {kind}")
    site, disk = on_disk(kind, "durable")
    rank = site.rank(captures=small_capture)
    empty = 0
    for _ in range(LATE_LOSSES):
        empty += lose_power(site, disk, rank, generator.uniform(*JOURNAL_S), 0.4)
        site.report(NOT_YET, HALF_SYNCED)
    acked = site.finish((), HALF_SYNCED)["acked"]
    figures.note(
        f"power loss {kind}, late", losses=LATE_LOSSES, acked=acked, zero_length_files=empty, **site.judged
    )


@pytest.mark.parametrize("after_s", [0.5, 7.0])
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_buffered_store_opens_after_power_loss_and_goes_on(
    kind: str, after_s: float, on_disk: MakeSite
) -> None:
    """Acknowledged records may be lost then; what is there is right, and every series takes records again."""
    site, disk = on_disk(kind, "buffered")
    rank = site.rank(captures=small_capture)
    empty = lose_power(site, disk, rank, after_s, 0.4)
    assert site.start(), site.says()
    rank.connect()
    rank.drain()
    refused = len(rank.refusals)
    rank.offer(48)
    rank.bye()
    assert len(rank.refusals) == refused, list(rank.refusals.values())[-1]
    assert site.stop() == 0, site.says()
    lost = len(site.report("lost", HALF_SYNCED)["lost"])
    figures.note(f"power loss {kind}, buffered, {after_s} s", zero_length_files=empty, lost_acked=lost)
