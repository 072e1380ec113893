"""Rounds of load that end in a SIGKILL: at a random moment, or at a named failpoint."""

from __future__ import annotations

import random
import threading
import time

from tests.fault.kit.load import Gone, LoadRank
from tests.fault.kit.site import Site

__all__ = ["failpoint_spec", "kill_rounds", "prepare_for"]

WINDOW_S = 0.5  # after "listening": recovery, sessions, commits and seals all happen in it
AFTER_A_FAILED_SYNC = "rewrite.before_rename"


def kill_rounds(site: Site, ranks: list[LoadRank], kills: int, generator: random.Random) -> float:
    """Start, load and kill the daemon `kills` times; the slowest start in seconds."""
    slowest = 0.0
    for _ in range(kills):
        began = time.monotonic()
        assert site.start(), site.says()
        slowest = max(slowest, time.monotonic() - began)
        deadline = time.monotonic() + generator.uniform(0.0, WINDOW_S)
        assert site.process is not None
        timer = threading.Timer(deadline - time.monotonic(), site.process.kill)
        timer.start()
        _load_until(site, ranks, deadline, generator)
        timer.join()
        site.kill()
    return slowest


def _load_until(site: Site, ranks: list[LoadRank], deadline: float, generator: random.Random) -> None:
    """Offer from all ranks, and seal now and then, until the time has come or the daemon is gone."""
    try:
        for rank in ranks:
            rank.connect()
        while time.monotonic() < deadline:
            for rank in ranks:
                rank.offer(generator.randrange(1, 8))
            if generator.random() < 0.1:
                site.seal()
    except Gone:
        assert time.monotonic() >= deadline, site.says()


def failpoint_spec(name: str, action: str) -> str:
    """CAPD_FAILPOINTS for one point; one of them is reached only behind a failed sync."""
    before = ["sync.before=error"] if name == AFTER_A_FAILED_SYNC else []
    return ",".join([*before, f"{name}={action}"])


def prepare_for(site: Site, name: str) -> None:
    """Bring the store into a state from which the daemon reaches failpoint `name`."""
    site.options = (
        ("--durability", "durable") if name.startswith("sync.") or name == AFTER_A_FAILED_SYNC else ()
    )
    # The compact copy is of a shard whose last chunk is continued: by the rank that the test takes.
    rank = site.rank(0 if name.startswith("compact.") else 7)
    assert site.start()
    rank.connect()
    rank.offer(10)
    rank.drain()
    if name.startswith("recover."):
        site.kill()
        return
    rank.bye()
    site.begins[rank.rank] = rank.next
    site.ranks.remove(rank)
    rank.close()
    assert site.stop() == 0
