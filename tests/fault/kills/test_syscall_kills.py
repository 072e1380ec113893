"""SIGKILL at the Nth system call of a kind: every step of every protocol is once the last one that happened."""

from __future__ import annotations

import signal

import pytest

from tests.fault.kit import figures
from tests.fault.kit.site import Site, exercise
from tests.fault.kit.tracing import inject, needs_strace

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

CALLS = {
    "pwritev,pwritev2": "buffered",  # frames, documents
    "write": "buffered",  # messages, log lines
    "pwrite64": "buffered",  # catalog, owner note
    "mkdir": "buffered",
    "link,linkat": "buffered",
    "rename,renameat,renameat2": "buffered",
    "unlink,unlinkat,rmdir": "buffered",
    "ftruncate,truncate": "buffered",
    "copy_file_range": "buffered",
    "fsync": "durable",
    "fdatasync": "durable",
    "syncfs": "durable",
}


PASSES = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610)


@pytest.mark.parametrize("calls", CALLS)
def test_a_kill_at_any_pass_of_a_call_loses_nothing(calls: str, site: Site) -> None:
    """One store goes through all N, so that recoveries are killed as well as the work they precede."""
    needs_strace()
    site.options = ("--durability", CALLS[calls])
    ranks = [site.rank(number) for number in range(2)]
    kills = covered = 0
    for passes in PASSES:
        alive = site.start(prefix=inject(calls, "signal=SIGKILL", passes))
        if alive and exercise(site, *ranks, captures=10):
            break
        assert site.ended() == -signal.SIGKILL, site.says()
        kills += 1
        covered = passes
        site.report()
    assert kills > 0, f"no {calls} was ever reached"
    acked = site.finish()["acked"]
    figures.note(f"SIGKILL in {calls}", kills=kills, up_to_pass=covered, acked=acked, **site.judged)
