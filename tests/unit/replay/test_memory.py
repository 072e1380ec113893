"""The memory of a replay besides the captured operands, in a process of its own."""

from __future__ import annotations

import pytest

from benchmarks.products.replay import MOST_MIB, STOCHASTIC
from benchmarks.store.store_runner import child


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("recipe", "draws", "blame"),
    [
        ("nvfp4", 1, False), ("nvfp4-te", 1, False), ("quartet", 1, False), (STOCHASTIC, 3, False),
        ("nvfp4", 1, True), ("mxfp4-rht-sr", 3, False), ("nvfp4-te", 1, True), ("quartet", 3, True),
        ("quartet2", 3, True),
    ],
)  # fmt: skip
def test_a_call_of_4096_takes_384_mib(recipe: str, draws: int, blame: bool) -> None:
    found = child("benchmarks.products.replay:peak", size=4096, recipes=[recipe], draws=draws, blame=blame)
    assert 0 < found["mib"] <= MOST_MIB
