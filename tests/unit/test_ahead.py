"""Work that is begun ahead: results in order, never more than the limit under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capd.ahead import ahead


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 60))
def test_results_come_in_order_and_the_limit_holds(costs: list[int], limit: int) -> None:
    under_way: list[int] = []
    most = 0

    def begin(item: tuple[int, int]) -> int:
        under_way.append(item[1])
        return -item[0]

    taken = []
    for item, begun in ahead(list(enumerate(costs)), begin, lambda item: item[1], limit):
        most = max(most, sum(under_way) if len(under_way) > 1 else 0)
        assert len(under_way) <= 64
        taken.append((item[0], begun))
        assert under_way.pop(0) == item[1]

    assert taken == [(number, -number) for number in range(len(costs))]
    assert most <= limit


def test_what_begin_raises_is_raised_behind_what_was_begun() -> None:
    def begin(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        return item

    found = []
    try:
        for item, _ in ahead(range(5), begin, lambda _: 2, limit_nbytes=2):
            found.append(item)
    except ValueError as error:
        found.append(str(error))

    assert found == [0, 1, 2, "three"]
