"""The page of a daemon that has seen many runs stays small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.daemon import DaemonProcess, Rank, daemons, wait_for
from tests.kit.metrics.scrape import address_of, get
from tests.kit.tiers import rows

MAX_SERIES = 64 * 30


@pytest.mark.timeout(240)  # 1,600 ranks, one after the other
@pytest.mark.parametrize(("runs", "ranks"), rows([(70, 1), (200, 8)], [(70, 1)]))
def test_the_page_is_bounded_after_many_runs(runtime_dir: Path, runs: int, ranks: int) -> None:
    config = runtime_dir / "capd.toml"
    config.write_text("[daemon]\nidle_seal_s = 0.0\n")
    with daemons() as made:
        made.append(
            DaemonProcess(runtime_dir / "store", runtime_dir / "s.sock", "--config", str(config),
                          "--metrics", "127.0.0.1:0")
        )  # fmt: skip
        where = address_of(made[0])
        for number in range(runs):
            for rank in range(ranks):
                here = Rank(runtime_dir / "s.sock", rank=rank, run_id=f"run-{number}", arena_nbytes=1 << 16)
                here.connect()
                here.count(offered=2, arena_full=1)
                here.put(1)
                here.expect_acks(1)
                here.bye()
                here.close()
        last = f'run_id="run-{runs - 1}"'
        page = wait_for(
            lambda: (found := get(where).body) and f'{{{last},state="ended"}} {ranks}\n' in found and found,
            "the end",
        )
        wait_for(lambda: len(get(where).samples) <= MAX_SERIES, "the page is small")

        assert last in page
        assert page.count("capd_run_info{") <= 64
        assert made[0].stop() == 0
