"""Random kills and stops of either side, every few seconds: at the end every promise has been kept.

CAPD_CHAOS_SECONDS: how long faults rain (default 60); CAPD_CHAOS_SEED: the seed, else a new one, which is printed.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from tests.fault.chaos.chaos import Chaos
from tests.fault.chaos.chaos_judge import judge
from tests.fault.kit import figures
from tests.fault.kit.site import Site

# The tests themselves run without any CAPD_ variable.
SECONDS = float(os.environ.get("CAPD_CHAOS_SECONDS", "60"))
SEED = os.environ.get("CAPD_CHAOS_SEED") or secrets.token_hex(4)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(SECONDS * 2 + 600)]


def test_under_random_faults_of_either_side_every_promise_is_kept(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chaos = Chaos(site, tmp_path, SEED)
    with capsys.disabled():
        print(f"\nchaos: {SECONDS:.0f} s, CAPD_CHAOS_SEED={SEED}")
    try:
        chaos.run(SECONDS)
        chaos.end()
    finally:
        chaos.close()
    found = judge(chaos, tmp_path / "all.jsonl")
    figures.note("chaos", seconds=int(SECONDS), seed=SEED, **found)
    figures.note("chaos faults", **chaos.faults)
