"""A disk that fills up, by bytes and by inodes: stopped before it is full, or met; then room is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.kit import figures
from tests.fault.kit.file_systems import mounted_tmpfs
from tests.fault.kit.load import Capture, LoadRank, capture
from tests.fault.kit.site import Site
from tests.kit.processes import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(200)]

REFUSALS = 12


def many_series(rank: int, n: int) -> Capture:
    """Every capture begins a series of its own."""
    what = capture(rank, 0)
    return what._replace(name=f"tensor{n}", payload=n.to_bytes(4) * (len(what.payload) // 4))


@pytest.fixture
def small_disk(tmp_path: Path, runtime_dir: Path) -> Iterator[Callable[[str], Site]]:
    """`small_disk(mount options)` → a site on a tmpfs of its own."""
    with mounted_tmpfs(tmp_path / "options", "size=1m"):
        pass
    opened: list[Site] = []
    (tmp_path / "options").rmdir()
    contexts = []

    def make(options: str) -> Site:
        contexts.append(mounted_tmpfs(tmp_path / "disk", options))
        directory = contexts[-1].__enter__()
        opened.append(Site(directory, runtime_dir, log=tmp_path / "expected.jsonl"))
        return opened[-1]

    yield make
    for site in opened:
        site.close()
    for context in contexts:
        context.__exit__(None, None, None)


def fill(rank: LoadRank) -> int:
    """Offer until a good number were refused; returns how many records were kept."""
    rank.connect()
    while len(rank.refusals) < REFUSALS:
        rank.offer()
        rank.drain()
    assert {reason for reason, _ in rank.refusals.values()} == {"disk_full"}, rank.refusals
    return rank.log.acked


def resumes(site: Site, rank: LoadRank) -> int:
    """With room again the same daemon takes captures; returns how many it took."""
    before = site.log.acked

    def taken() -> int:
        rank.offer()
        rank.drain()
        return site.log.acked - before

    until(lambda: taken() >= 10)
    return site.log.acked - before


def go_on(site: Site, rank: LoadRank, name: str, **noted: int) -> None:
    """With room again: more captures, a clean stop, and nothing lost; the figures are noted under `name`."""
    after = resumes(site, rank)
    assert site.stop() == 0, site.says()
    site.report()
    figures.note(name, **noted, refused=site.log.refused, after_resume=after, **site.judged)


@pytest.mark.parametrize("keep_free", ["4MiB", "0"])
def test_a_disk_full_of_bytes(keep_free: str, small_disk: Callable[[str], Site]) -> None:
    site = small_disk("size=24m")
    ballast = site.store.parent / "ballast"
    ballast.write_bytes(bytes(8 << 20))
    rank = site.rank()
    assert site.start("--keep-free", keep_free)
    kept = fill(rank)
    found = os.statvfs(site.store)
    free = found.f_bavail * found.f_frsize
    if keep_free != "0":
        assert free >= 2 << 20  # what was admitted may be larger on disk, by headers and documents
    site.report()
    ballast.unlink()
    go_on(site, rank, f"disk full, keep_free {keep_free}", kept=kept, free_at_stop=free)


@pytest.mark.parametrize("keep_free", ["10%", "0"])
def test_a_disk_full_of_inodes(keep_free: str, small_disk: Callable[[str], Site]) -> None:
    site = small_disk("size=64m,nr_inodes=3000")
    ballast = [site.store.parent / f"ballast{number}" for number in range(2000)]
    for path in ballast:
        path.touch()
    rank = site.rank(captures=many_series)
    assert site.start("--keep-free", keep_free)
    kept = fill(rank)
    free = os.statvfs(site.store).f_favail
    if keep_free != "0":
        assert free > 0
    site.report()
    for path in ballast:
        path.unlink()
    go_on(site, rank, f"inodes used up, keep_free {keep_free}", kept=kept, free_at_stop=free)
