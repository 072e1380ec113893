"""Sizes as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd_client.config.sizes import amount_nbytes, parse_amount


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123", 123),
        ("1B", 1),
        ("200GB", 200 * 10**9),
        ("200 gb", 200 * 10**9),
        ("1GiB", 1 << 30),
        ("1.5 KiB", 1536),
        ("0.3GiB", 322122547),
        ("2TB", 2 * 10**12),
        (4096, 4096),
        ("10%", 0.1),
        ("0%", 0.0),
        ("100%", 1.0),
        (0.25, 0.25),
    ],
)
def test_a_size_is_read_as_bytes_or_as_a_share(text: object, expected: float) -> None:
    found = parse_amount(text)

    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1", -1, "1e9", "20 bananas", "101%", "0.5", 1.5, True, None, "1 2", "2G", "2iB", "²GB"],
)
def test_what_is_no_size_is_refused_with_examples(text: object) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_amount(text)


@given(st.integers(0, 2**60), st.sampled_from(["", "KB", "KiB", "MB", "MiB", "GB", "GiB"]))
def test_whole_numbers_with_a_unit_are_exact(number: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    power = "KMG".find(unit[:1]) + 1 if unit else 0

    assert parse_amount(f"{number}{unit}") == number * base**power


def test_a_share_is_taken_of_the_file_system() -> None:
    assert amount_nbytes(0.1, 1000) == 100
    assert amount_nbytes(77, 1000) == 77
