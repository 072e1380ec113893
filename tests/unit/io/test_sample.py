"""The sample of `--sample`: as many records as asked, evenly spread, the same each time, and no period of the job."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.errors import ConfigError
from capd.io.sample import places_of, share_of


@pytest.mark.parametrize(
    ("text", "share"), [("5%", 0.05), ("0.05", 0.05), (".5", 0.5), ("100%", 1.0), ("1", 1.0), ("0.1%", 0.001)]
)
def test_a_share_is_a_percentage_or_a_fraction(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "1.5", "5", "-5%", "five", "5%%", "nan", "1e-3"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"as 5% or 0\.05"):
        share_of(text)


@given(st.integers(0, 5000), st.floats(0.0001, 1), st.integers(0, 10_000))
def test_each_equal_part_of_a_series_gives_one_record(total: int, share: float, turn: int) -> None:
    places = sorted(places_of(total, share, turn))

    assert len(places) == min(total, max(1, round(total * share)))
    assert places == sorted(places_of(total, share, turn))
    assert [place * len(places) // total for place in places] == pytest.approx(range(len(places)), abs=1)


def test_every_record_is_as_probable_and_no_period_is_met() -> None:
    found = Counter(place for turn in range(200) for place in places_of(64, 1 / 8, turn))

    assert set(found) == set(range(64))
    assert min(found.values()) >= 15
    assert max(found.values()) <= 35
    of_a_kind = sum(found[place] for place in range(0, 64, 8)) / sum(found.values())
    assert of_a_kind == pytest.approx(1 / 8, abs=0.03)
