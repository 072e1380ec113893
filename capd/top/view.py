"""The state of the screen that its user changes by keys: run, orders, filter, cursors, panes. No terminal."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from capd.live.events import LiveEvent
from capd.live.records import NewRecord
from capd.live.state import LiveSample, RankState, RunState
from capd.top.ranks import RANK_ORDERS, chosen_ranks
from capd.top.records import RECORD_ORDERS, chosen_records

__all__ = ["ListArea", "TopData", "TopView"]

Focus = Literal["ranks", "records"]
_MAX_FILTER = 80


@dataclass(frozen=True, slots=True)
class TopData:
    """What the screen shows at one moment.

    Attributes:
        events: The events and the alerts of all runs, the newest last.
        run_id: The run that everything below is of; "" for none.
        alerts: The number of its alerts by severity.
        alerts_problem: Why they could not be read; "" if they were.
        records: The newest records of the run, the newest first.
        note: What is to be said of them, such as how many were left out; "" for nothing.
        run_rates: The records per second of the run over the last minute.
        rank_rates: Those of the rank whose details are shown.
    """

    sample: LiveSample = field(default_factory=LiveSample)
    events: tuple[LiveEvent, ...] = ()
    run_id: str = ""
    alerts: Mapping[str, int] = field(default_factory=dict)
    alerts_problem: str = ""
    records: Sequence[NewRecord] = ()
    note: str = ""
    run_rates: Sequence[float | None] = ()
    rank_rates: Sequence[float | None] = ()


class ListArea(NamedTuple):
    """Where a list is on the screen, for the mouse: its first row of cells and columns, and its first item."""

    focus: Focus
    x: int
    y: int
    width: int
    height: int
    first: int


@dataclass(slots=True)
class _Cursor:
    """A place in a list. It stays with its item when the order changes."""

    # None: the first item, whichever that is.
    item: Hashable | None = None
    at: int = 0
    top: int = 0
    page: int = 1


@dataclass(slots=True)
class TopView:
    """The state of the screen.

    Attributes:
        run_id: The run that was asked for; None shows the newest one with live ranks.
        pane: What is shown beside or below the ranks.
        overlay: What is shown instead of both lists.
        typing: The filter while it is typed; None otherwise.
        pinned: The rank or record whose details the overlay shows.
        scroll: The first line of the overlay.
        areas: Where the lists are on the screen.
        head: The size of the screen and the most lines that its head took there.
        middle: The column where the right part of the screen begins; 0 if there is none.
    """

    run_id: str | None = None
    focus: Focus = "ranks"
    pane: Literal["", "records", "drops"] = "records"
    overlay: Literal["", "help", "rank", "record"] = ""
    wanted: str = ""
    typing: str | None = None
    paused: bool = False
    pinned: Any = None
    scroll: int = 0
    rank_order: str = "rank"
    record_order: str = "newest"
    cursors: dict[Focus, _Cursor] = field(default_factory=lambda: {"ranks": _Cursor(), "records": _Cursor()})
    areas: list[ListArea] = field(default_factory=list)
    head: tuple[int, int, int] = (0, 0, 0)
    middle: int = 0

    # What is shown

    def run(self, data: TopData) -> RunState | None:
        """Return the run that is shown; None if there is none."""
        runs = () if data.sample.node is None else data.sample.node.runs
        if self.run_id is not None:
            return next((run for run in runs if run.run_id == self.run_id), None)
        return next((run for run in reversed(runs) if run.live), runs[-1] if runs else None)

    def of_run(self, data: TopData) -> TopData:
        """Return the data without what belongs to another run, as after a key that goes to the next one."""
        run = self.run(data)
        if run is not None and run.run_id == data.run_id:
            return data
        return TopData(data.sample, data.events, note="" if run is None else "not read yet")

    @property
    def filter(self) -> str:
        """The filter in force, also while it is typed."""
        return self.wanted if self.typing is None else self.typing

    def ranks(self, data: TopData) -> list[RankState]:
        """Return the ranks in the order of their rows."""
        return chosen_ranks(self.run(data), self.rank_order, self.filter)

    def records(self, data: TopData) -> list[NewRecord]:
        """Return the records in the order of their rows."""
        return chosen_records(self.of_run(data).records, self.record_order, self.filter)

    def place(self, focus: Focus, items: Sequence[Any]) -> int:
        """Return the index of the cursor in a list, and remember it."""
        cursor = self.cursors[focus]
        if cursor.item is None:
            cursor.at = 0
            return 0
        found = next((at for at, item in enumerate(items) if _identity(item) == cursor.item), None)
        # An item that is gone leaves the cursor where it was.
        cursor.at = max(0, min(cursor.at, len(items) - 1)) if found is None else found
        return cursor.at

    def window(self, focus: Focus, items: Sequence[Any], height: int) -> range:
        """Return the indices of the rows that `height` lines show, so that the cursor is among them."""
        cursor, at = self.cursors[focus], self.place(focus, items)
        cursor.page = max(1, height)
        top = min(cursor.top, at)
        top = max(top, at - height + 1, 0)
        cursor.top = max(0, min(top, len(items) - height))
        return range(cursor.top, min(len(items), cursor.top + max(0, height)))

    def under_cursor(self, data: TopData) -> RankState | NewRecord | None:
        """Return the rank or the record under the cursor of the list in focus."""
        items: Sequence[Any] = self.ranks(data) if self.focus == "ranks" else self.records(data)
        return items[self.place(self.focus, items)] if items else None

    def rank_under_cursor(self, data: TopData) -> RankState | None:
        """Return the rank under the cursor of the ranks."""
        ranks = self.ranks(data)
        return ranks[self.place("ranks", ranks)] if ranks else None

    # What keys do

    def press(self, key: str, character: str | None, data: TopData) -> bool:
        """Take a key. Return False if the user wants to leave.

        Args:
            key: Its name, as Textual has it.
            character: The character that it types; None for others.
            data: What the screen shows.
        """
        if self.typing is not None:
            self._type(key, character)
        elif character in ("q", "Q") or key in ("ctrl+c", "ctrl+q"):
            return False
        elif self.overlay:
            self._in_overlay(key, character)
        elif not self._move(key, data):
            self._command(key, character, data)
        return True

    def _type(self, key: str, character: str | None) -> None:
        text = self.typing or ""
        if key == "enter":
            self.wanted, self.typing = text, None
        elif key in ("escape", "ctrl+c"):
            self.typing = None
        elif key in ("backspace", "ctrl+h"):
            self.typing = text[:-1]
        elif key == "ctrl+u":
            self.typing = ""
        elif character is not None:
            self.paste(character)

    def paste(self, text: str) -> None:
        """Take text that is pasted into the filter."""
        if self.typing is not None:
            more = "".join(char for char in text if char.isprintable())
            self.typing = (self.typing + more)[:_MAX_FILTER]

    def _in_overlay(self, key: str, character: str | None) -> None:
        step = {"down": 1, "up": -1, "pagedown": 10, "pageup": -10, "home": -(1 << 30), "end": 1 << 20}.get(
            key
        )
        if step is not None:
            self.scroll = max(0, self.scroll + step)
        elif key in ("escape", "enter") or character == "?":
            self.overlay, self.scroll, self.pinned = "", 0, None
        elif character == "p":
            self.paused = not self.paused

    def _move(self, key: str, data: TopData) -> bool:
        items: Sequence[Any] = self.ranks(data) if self.focus == "ranks" else self.records(data)
        page = self.cursors[self.focus].page
        step = {
            "down": 1, "up": -1, "j": 1, "k": -1, "pagedown": page, "pageup": -page,
            "home": -len(items), "end": len(items),
        }.get(key)  # fmt: skip
        if step is None:
            return False
        if items:
            self._go(self.focus, items, max(0, min(len(items) - 1, self.place(self.focus, items) + step)))
        return True

    def _go(self, focus: Focus, items: Sequence[Any], at: int) -> None:
        cursor = self.cursors[focus]
        cursor.at = at
        # The first row follows the newest record.
        cursor.item = None if at == 0 else _identity(items[at])

    def _command(self, key: str, character: str | None, data: TopData) -> None:
        if key == "enter":
            self._open(data)
        elif key == "escape":
            self.wanted = ""
        elif key in ("tab", "shift+tab"):
            self._other_list()
        elif character == "?":
            self.overlay, self.scroll = "help", 0
        elif character == "/":
            self.typing = self.wanted
        elif character == "p":
            self.paused = not self.paused
        elif character == "s":
            self._sort()
        elif character == "r":
            self._next_run(data)
        elif character == "d":
            self.pane, self.focus = ("" if self.pane == "drops" else "drops"), "ranks"
        elif character == "t":
            self._tensors()

    def _open(self, data: TopData) -> None:
        self.pinned = self.under_cursor(data)
        if self.pinned is not None:
            self.overlay, self.scroll = ("rank" if isinstance(self.pinned, RankState) else "record"), 0

    def _other_list(self) -> None:
        if self.pane == "records":
            self.focus = "records" if self.focus == "ranks" else "ranks"

    def _tensors(self) -> None:
        if self.pane == "records":
            self.pane, self.focus = "", "ranks"
        else:
            self.pane, self.focus = "records", "records"

    def _sort(self) -> None:
        if self.focus == "ranks":
            self.rank_order = _next(list(RANK_ORDERS), self.rank_order)
        else:
            self.record_order = _next(list(RECORD_ORDERS), self.record_order)

    def _next_run(self, data: TopData) -> None:
        runs = [] if data.sample.node is None else [run.run_id for run in data.sample.node.runs]
        shown = self.run(data)
        if runs:
            self.run_id = _next(runs, runs[-1] if shown is None else shown.run_id)
            self.cursors = {"ranks": _Cursor(), "records": _Cursor()}

    def click(self, x: int, y: int, data: TopData) -> None:
        """Take a click of the mouse: the cursor goes there. A click where it is opens the details."""
        if self.overlay or self.typing is not None:
            return
        for area in self.areas:
            if not (area.x <= x < area.x + area.width and area.y <= y < area.y + area.height):
                continue
            items: Sequence[Any] = self.ranks(data) if area.focus == "ranks" else self.records(data)
            at = area.first + y - area.y
            if at < len(items):
                was = self.focus == area.focus and self.place(area.focus, items) == at
                self.focus = area.focus
                self._go(area.focus, items, at)
                if was:
                    self._open(data)


def _identity(item: RankState | NewRecord) -> Hashable:
    return item.client if isinstance(item, RankState) else (item.path, item.number)


def _next(names: Sequence[str], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]
