"""Texts of known widths, short numbers and sparklines."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd.top.lines import Span, divided, flow, padded, plain
from capd.top.text import count, duration, fit, fit_name, safe, spark, speed, width_of


@given(st.text(max_size=40), st.integers(0, 30), st.booleans())
def test_a_fitted_text_takes_exactly_its_width(text: str, width: int, right: bool) -> None:
    assert width_of(fit(safe(text), width, right=right)) == width
    assert width_of(fit_name(safe(text), width)) == width


@given(st.text(max_size=60))
def test_a_safe_name_moves_no_cursor(text: str) -> None:
    for char in safe(text):
        assert char.isprintable()
        assert unicodedata.category(char) not in ("Mn", "Me", "Cf", "Cc")


def test_a_name_keeps_its_beginning_and_more_of_its_end() -> None:
    assert fit_name("model.layers.12.self_attn.q_proj", 16) == "model…ttn.q_proj"
    assert fit("层层层", 4) == "层… "


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(999_999), "999,999"), (count(1_234_567), "1.23M"), (count(98_765_432_100), "98.8G"),
        (speed(None), "-"), (speed(float("inf")), "-"), (speed(0.0), "0"), (speed(3.14), "3.1"), (speed(99.6), "100"),
        (speed(123_456.0), "123k"), (duration(3.21), "3.2 s"), (duration(119), "119 s"), (duration(3599), "59 min"),
        (duration(7200), "2 h 0 min"), (duration(200_000), "2 d 7 h"), (duration(1e12), "years"),
    ],
)  # fmt: skip
def test_numbers_are_short(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_sparkline_is_scaled_to_its_largest_value() -> None:
    assert spark([None, 0, 1, 50, 100]) == " ▁▂▅█"
    assert spark([0, 0, None]) == "▁▁ "
    assert spark([]) == ""


@given(st.lists(st.text("ab层", max_size=9), max_size=6), st.integers(0, 40))
def test_a_line_is_divided_at_a_column_without_loss_of_width(texts: list[str], at: int) -> None:
    whole = padded(tuple(Span(text, "bold") for text in texts), 30)
    left, right = divided(whole, at)

    assert width_of("".join(span.text for span in left)) == min(at, 30)
    assert width_of("".join(span.text for span in (*left, *right))) == 30
    if "层" not in "".join(texts):
        assert "".join(span.text for span in (*left, *right)) == "".join(span.text for span in whole)


def test_items_flow_and_are_never_divided() -> None:
    items = [(Span(word),) for word in ("aaaa", "bbbb", "cc", "dddddd")]

    assert [plain(line) for line in flow(items, 10, 9)] == ["aaaa  bbbb", "cc  dddddd"]
    assert [plain(line) for line in flow(items, 10, 1)] == ["aaaa  bbbb"]
    assert [plain(line) for line in flow(items, 4, 9)] == ["aaaa", "bbbb", "cc", "ddd…"]
