"""The numbers of calls: counted for each key within a micro-batch, also by several threads."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from capd_client.steps.call_numbers import CallNumbers


def test_calls_are_counted_per_key_within_a_micro_batch() -> None:
    numbers = CallNumbers()
    assert [numbers.next("a", 0, 0) for _ in range(3)] == [0, 1, 2]
    assert numbers.next("b", 0, 0) == 0
    assert numbers.next("a", 0, 1) == 0
    assert numbers.next("a", 0, 0) == 3
    for iteration in range(1, 1000):
        numbers.next("a", iteration, 0)
    assert len(numbers._counters) <= 64


def test_calls_of_threads_at_one_moment_have_numbers_of_their_own() -> None:
    numbers, together = CallNumbers(), Barrier(4)

    def count_calls(_: int) -> list[int]:
        together.wait()
        return [numbers.next("a", 0, 0) for _ in range(100_000)]

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            counted = list(threads.map(count_calls, range(4)))
    finally:
        sys.setswitchinterval(switching)
    assert sorted(call for calls in counted for call in calls) == list(range(4 * 100_000))
