"""A daemon that recovers thousands of records is told to stop at any moment: all is sealed, or untouched."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import zarr

from tests.fault.kit import figures
from tests.fault.kit.load import Capture
from tests.fault.kit.site import Site
from tests.kit.processes import until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

RECORDS = 9_000
SERIES = 6
ROUNDS = 16
LONGEST_S = 1.5  # beyond the start of the process, or of its listening


def spread(rank: int, n: int) -> Capture:
    """Small records of several series, and a large one each 300."""
    nbytes = 300_000 if n % 300 == 299 else 2_048
    payload = n.to_bytes(4) * (nbytes // 4)
    name = f"large{n % 2}" if nbytes > 2_048 else f"small{n % SERIES}"
    return Capture(name, "bfloat16", (nbytes // 2,), payload)


def published(run: Path) -> int:
    return sum(zarr.open_array(path, mode="r").shape[0] for path in run.glob("*/*/*/*/*/data"))


def test_a_start_that_is_stopped_at_any_moment_seals_what_it_found(site: Site, tmp_path: Path) -> None:
    assert site.start(), site.says()
    rank = site.rank(captures=spread)
    rank.connect()
    rank.offer(RECORDS)
    rank.drain()
    site.kill()
    as_left = tmp_path / "as-left"
    shutil.copytree(site.store, as_left)
    hidden = RECORDS - published(site.run)
    assert hidden > 500
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    early = 0
    for number in range(ROUNDS):
        shutil.rmtree(site.store)
        shutil.copytree(as_left, site.store)
        site.start_unwatched()
        if number % 2:
            until(lambda: "listening on" in site.says() or not site.is_alive())
        time.sleep(moments.uniform(0, LONGEST_S / (1 + number % 2 * 4)))  # a moment, not a wait for something
        process = site.process
        assert process is not None
        for _ in range(1 + number % 3):  # a second and a third one change nothing
            process.send_signal(moments.choice((signal.SIGTERM, signal.SIGHUP)))
        code = site.ended()
        assert code == 0 or (code < 0 and "listening on" not in site.says()), (
            f"seed {seed}: {code} {site.says()}"
        )
        early += code < 0
        assert published(site.run) == (RECORDS if code == 0 else RECORDS - hidden), (
            f"seed {seed}: {site.says()}"
        )
        site.report()
    assert site.finish()["found"] == RECORDS
    figures.note(
        "starts that were stopped", rounds=ROUNDS, before_the_store_was_owned=early, hidden=hidden, lost=0
    )
