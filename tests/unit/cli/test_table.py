"""Tables for people: what fits a terminal, what is left out, and how numbers stand below each other."""

from __future__ import annotations

from unicodedata import east_asian_width

import pytest

from capd.cli.table import Column, aligned, fitted, in_one_unit
from tests.kit.tiers import rows

NAMES = ["layers.0.attention.q_proj.forward.input", "layers.11.mlp.down_proj.backward.grad_output"]
COLUMNS = (
    Column("series", NAMES, is_name=True),
    Column("dtype", ["bfloat16", "float32"], spare=2),
    Column("records", ["4", "1,024"], right=True),
    Column("stored MiB", ["0.5", "12"], right=True, spare=1),
)


def test_without_a_terminal_nothing_is_shortened() -> None:
    lines, left_out = fitted(COLUMNS, None)

    assert left_out == []
    assert all(name in "\n".join(lines) for name in NAMES)
    assert lines[0].split("  ")[0] == "series"


@pytest.mark.parametrize("width", rows(range(20, 100), quick=(20, 45, 60)))
def test_a_table_fits_whatever_the_terminal(width: int) -> None:
    lines, left_out = fitted(COLUMNS, width)

    narrowest = 16 + 2 + len("records")
    assert max(map(len, lines)) <= max(width, narrowest)
    assert len(lines) == 3
    assert left_out == ["dtype", "stored MiB"][: len(left_out)]
    if width >= 60:
        assert left_out == []
    for line, name in zip(lines[1:], NAMES, strict=True):
        shown = line.split("  ")[0]
        assert shown == name or (name.startswith(shown.split("…")[0]) and name.endswith(shown.split("…")[1]))


@pytest.mark.parametrize("width", rows(range(30, 80), quick=(30, 41)))
def test_chinese_names_take_two_columns_a_character(width: int) -> None:
    names = ["模型.层.0.注意力.查询投影.前向.输入", "layers.0.q.forward.input"]

    lines, _ = fitted(
        [Column("series", names, is_name=True), Column("记录", ["4", "1,024"], right=True)], width
    )

    shown = [len(line) + sum(east_asian_width(char) in "WF" for char in line) for line in lines]
    assert max(shown) <= width
    assert len({*shown}) == 1


def test_columns_that_must_stay_do() -> None:
    lines, left_out = fitted([Column("a", ["x" * 50]), Column("b", ["y"], spare=1)], 20)

    assert (left_out, lines) == (["b"], ["a", "x" * 50])


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([33.313, 0.02232, 1.0], ["33.3   ", " 0.0223", " 1     "]),
        ([1234.5, 12.0, None], ["1234 ", "  12", "-"]),
        ([0.0, 0.5], ["0    ", "0.500"]),
        ([float("inf"), float("nan"), -1.25], ["inf", "nan", "-1.25"]),
        ([1.2e-7, 0.25], ["1.20e-07", "0.250"]),
        ([2.5e9], ["2.50e+09"]),
        ([100.0, 1000.0, 20.0, 0.5], ["100", "1000", "20", "0.500"]),
        ([99.96, 9.996, 0.9996], ["100", "10.0", "1.00"]),
        ([], []),
    ],
)
def test_points_stand_below_each_other(values: list[float | None], texts: list[str]) -> None:
    found = aligned(values)

    assert [text.strip() for text in found] == [text.strip() for text in texts]
    width = max(map(len, found), default=0)
    places = {text.rjust(width).find(".") for text in found if "." in text and "e" not in text}
    assert len(places) <= 1


def test_sizes_share_the_unit_of_the_largest() -> None:
    assert in_one_unit([512, 3 << 20]) == ("MiB", ["0.000488", "3       "])
    assert in_one_unit([1023, 5]) == ("KiB", ["0.999  ", "0.00488"])
    assert in_one_unit([0]) == ("B", ["0"])
    assert in_one_unit([]) == ("B", [])
    assert in_one_unit([1 << 62]) == ("PiB", ["4096"])
