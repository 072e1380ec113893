"""A block that is drawn again leaves nothing of the one before, and the screen as it was."""

from __future__ import annotations

import pytest

from capd.cli.redrawn import RedrawnBlock
from tests.kit.jobs.terminal import Screen


class Drawn:
    """A block and the screen that shows it, of a size that a test changes."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.screen, self._block = Screen(20, 6), RedrawnBlock()
        self._capsys, self._patch = capsys, monkeypatch
        self.screen.feed("$ capd\r\n")

    def draw(self, *lines: str) -> list[str]:
        self._patch.setenv("COLUMNS", str(self.screen.columns))
        self._patch.setenv("LINES", str(self.screen.rows))
        self._block.draw(lines)
        # A terminal returns to the first column.
        self.screen.feed(self._capsys.readouterr().out.replace("\n", "\r\n"))
        assert self.screen.wraps
        return self.screen.lines


@pytest.fixture
def drawn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return Drawn(capsys, monkeypatch)


def test_a_shorter_block_leaves_nothing_of_a_longer_one(drawn: Drawn) -> None:
    assert drawn.draw("one", "two and more", "three") == ["$ capd", "one", "two and more", "three"]
    assert drawn.draw("ONE", "2") == ["$ capd", "ONE", "2"]
    assert (drawn.screen.row, drawn.screen.column, drawn.screen.scrolled) == (3, 0, 0)


def test_lines_are_cut_off_whatever_their_colours(drawn: Drawn) -> None:
    shown = drawn.draw("a table of more than twenty", "\x1b[1mten letter\x1b[0m and twenty more")

    assert shown == ["$ capd", "a table of more tha…", "ten letter and twen…"]


def test_a_block_higher_than_the_screen_does_not_scroll_again_and_again(drawn: Drawn) -> None:
    for number in range(5):
        shown = drawn.draw(*(f"{number} {row}" for row in range(9)))

    assert shown == [f"4 {row}" for row in range(5)]
    assert drawn.screen.scrolled == 1  # the line above the block


def test_after_another_size_the_screen_holds_the_block_alone(drawn: Drawn) -> None:
    drawn.draw("a line of 17 long", "and a table here")
    drawn.screen.resize(8, 10)

    assert drawn.draw("now narrow", "a table") == ["now nar…", "a table"]
    assert drawn.draw("x") == ["x"]
