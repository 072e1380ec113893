"""RangeSet against a plain set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capd.store.format.ranges import RangeSet


@given(st.lists(st.integers(0, 40)), st.integers(0, 40))
def test_it_behaves_like_a_set(numbers: list[int], probe: int) -> None:
    ranges = RangeSet()
    for number in numbers:
        ranges.add(number)

    assert len(ranges) == len(set(numbers))
    assert (probe in ranges) == (probe in set(numbers))
    assert sorted(n for first, last in ranges.ranges() for n in range(first, last + 1)) == sorted(
        set(numbers)
    )
    assert all(a[1] + 1 < b[0] for a, b in zip(ranges.ranges(), ranges.ranges()[1:], strict=False))
    assert RangeSet(ranges.ranges()).ranges() == ranges.ranges()


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add_range", "remove"]), st.integers(0, 30), st.integers(0, 6))
)


@given(STEPS)
def test_its_size_is_right_after_any_operations(steps: list[tuple[str, int, int]]) -> None:
    ranges, plain = RangeSet([(3, 5), (9, 9)]), {3, 4, 5, 9}
    for name, first, more in steps:
        if name == "add":
            ranges.add(first)
            plain.add(first)
        elif name == "remove":
            ranges.remove(first)
            plain.discard(first)
        else:
            ranges.add_range(first, first + more)
            plain |= set(range(first, first + more + 1))
        assert (len(ranges), list(ranges)) == (len(plain), sorted(plain))
