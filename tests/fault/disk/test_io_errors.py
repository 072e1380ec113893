"""System calls that fail, at the Nth pass or for a while: nothing half is kept, nothing failed is acknowledged."""

from __future__ import annotations

import resource

import pytest

from tests.fault.kit import figures
from tests.fault.kit.load import Gone, LoadRank
from tests.fault.kit.site import Site, exercise
from tests.fault.kit.tracing import inject, injected, needs_strace
from tests.kit.processes import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

WRITES = "pwrite64,pwritev,pwritev2"
SYNCS = "fsync,fdatasync,syncfs"
RENAMES = "rename,renameat,renameat2,link,linkat"
CASES = [
    *((WRITES, name) for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EINTR", "EAGAIN")),
    (SYNCS, "EIO"),
    (RENAMES, "EIO"),
    ("unlink,unlinkat,rmdir", "EIO"),
    ("mkdir,mkdirat", "ENOSPC"),
    ("ftruncate,truncate", "EIO"),
    ("copy_file_range", "EIO"),
]
PASSES = (1, 2, 4, 8, 20, 50)


@pytest.mark.parametrize(("calls", "error"), CASES, ids=lambda value: value.split(",")[0])
def test_a_call_that_fails_once_costs_at_most_what_it_carried(calls: str, error: str, site: Site) -> None:
    """One store goes through all passes; where the daemon cannot start, it ends with a message."""
    needs_strace()
    site.options = ("--durability", "durable") if calls == SYNCS else ()
    rank = site.rank()
    for number in PASSES:
        if site.start(prefix=inject(calls, f"error={error}", number)):
            if not exercise(site, rank, captures=10) and site.is_alive():
                site.stop()
        else:
            assert site.ended() in (1, 3, 6), site.says()
            assert "Traceback" not in site.says()
        site.report()
    assert site.finish()["acked"] >= 20
    figures.note(
        f"{error} once in {calls.split(',')[0]}", points=len(PASSES), refused=site.log.refused, **site.judged
    )


def offered(site: Site, rank: LoadRank, count: int) -> tuple[int, int]:
    """Offer captures and wait for the answers: how many were acknowledged, and how many refused."""
    acked, refused = site.log.acked, site.log.refused
    rank.offer(count)
    rank.drain()
    return site.log.acked - acked, site.log.refused - refused


def running(site: Site, *options: str) -> LoadRank:
    """A daemon with a connected rank whose first captures are kept."""
    assert site.start(*options)
    rank = site.rank()
    rank.connect()
    assert offered(site, rank, 12) == (12, 0)
    return rank


def took_one(site: Site, rank: LoadRank) -> bool:
    """Whether a rank gets as far as one acknowledgement."""
    try:
        rank.connect()
        return offered(site, rank, 1)[0] > 0
    except Gone:
        return False


def goes_on(site: Site, rank: LoadRank) -> None:
    """The fault has passed: the same daemon takes captures again, and seals: first what it had begun, then all."""
    until(lambda: offered(site, rank, 6)[1] == 0, 60.0)
    assert site.seal() or site.seal(), site.says()
    site.report()


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS"])
def test_while_writes_fail_captures_are_refused_and_then_taken_again(error: str, site: Site) -> None:
    needs_strace()
    rank = running(site)
    assert site.process is not None
    with injected(site.process.pid, WRITES, f"error={error}"):
        assert offered(site, rank, 12) == (0, 12)
    reason = "store_error" if error in ("EIO", "EROFS") else "disk_full"
    assert {why for why, _ in rank.refusals.values()} == {reason}
    goes_on(site, rank)
    assert site.stop() == 0
    site.finish()


def test_nothing_is_acknowledged_while_syncs_fail(site: Site) -> None:
    """Durable: after a failed sync the kernel has forgotten which pages it did not write; nobody may trust them.

    The daemon either goes on in new files, or says that it must be started again.
    """
    needs_strace()
    site.options = ("--durability", "durable")
    rank = running(site)
    assert site.process is not None
    with injected(site.process.pid, SYNCS, "error=EIO"):
        assert offered(site, rank, 12) == (0, 12)
    refused = offered(site, rank, 6)[1]
    assert not refused or "restart" in list(rank.refusals.values())[-1][1], rank.refusals
    site.stop()
    site.report()
    site.finish()


@pytest.mark.parametrize("calls", [RENAMES, SYNCS])
def test_a_seal_that_fails_is_done_again(calls: str, site: Site) -> None:
    needs_strace()
    rank = running(site)
    assert site.process is not None
    with injected(site.process.pid, calls, "error=EIO"):
        assert not site.seal()
        site.report()
    goes_on(site, rank)
    assert site.stop() == 0
    site.finish()


def test_short_writes_are_completed_or_taken_back(site: Site) -> None:
    """A limit on file sizes: the kernel writes up to it, then says so; nothing of such a record remains."""
    rank = running(site)
    assert site.process is not None
    _, hard = resource.prlimit(site.process.pid, resource.RLIMIT_FSIZE)
    for limit in (700_001, 1_234_567, 2_000_003):
        resource.prlimit(site.process.pid, resource.RLIMIT_FSIZE, (limit, hard))
        offered(site, rank, 60)
        assert any("may not grow any more" in text for _, text in rank.refusals.values())
        site.report()
    resource.prlimit(site.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    goes_on(site, rank)
    assert site.stop() == 0
    site.finish()


def test_a_daemon_whose_run_cannot_be_opened_refuses_its_ranks_and_recovers(site: Site) -> None:
    needs_strace()
    rank = running(site)
    site.kill()
    assert site.start()
    assert site.process is not None
    with injected(site.process.pid, f"{WRITES},ftruncate", "error=EIO"):
        assert not took_one(site, rank)
    assert site.is_alive()
    rank.connect()
    goes_on(site, rank)
    assert site.stop() == 0
    site.finish()
