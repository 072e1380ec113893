"""The Textual application of `capd top`: it draws frames, and hands keys to the view."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from capd.live.state import RankState
from capd.top.feed import TopFeed
from capd.top.frame import frame
from capd.top.lines import Line, divided
from capd.top.text import width_of
from capd.top.view import TopData, TopView

__all__ = ["FrameWidget", "TopApp"]


@lru_cache(256)
def _style(words: str) -> Style:
    return Style.parse(words) if words else Style.null()


class FrameWidget(Widget):
    """Draws a part of a frame. Only lines that changed are written to the terminal, as far as they changed.

    Texts are drawn as they are: nothing in them is taken for markup.
    """

    def __init__(self, on_size: Callable[[], object]) -> None:
        """Begin empty. on_size: is called when the widget has another size, and needs lines for it."""
        super().__init__()
        self._lines: list[Line] = []
        self._on_size = on_size

    def on_resize(self, _: events.Resize) -> None:
        """Ask for lines of the new size."""
        self._on_size()

    def show(self, lines: list[Line]) -> None:
        """Draw lines of the size of the widget."""
        old, self._lines = self._lines, lines
        if len(old) != len(lines):
            self.refresh()
            return
        regions = [
            region
            for y, (before, after) in enumerate(zip(old, lines, strict=True))
            if (region := _changed(before, after, y)) is not None
        ]
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        """Return one line for the compositor."""
        if y >= len(self._lines):
            return Strip.blank(self.size.width)
        return Strip([Segment(text, _style(style)) for text, style in self._lines[y]])


def _changed(before: Line, after: Line, y: int) -> Region | None:
    """Return the region in which two lines differ; None if they are equal.

    Textual writes a line from its beginning to the end of its region, so there is one region for each line.
    """
    if before == after:
        return None
    first, x, end = -1, 0, 0
    is_alike = len(before) == len(after)
    for at, span in enumerate(after):
        width = width_of(span.text)
        if not is_alike or before[at] != span:
            # Spans of other widths move what follows.
            is_alike = is_alike and width_of(before[at].text) == width
            first = x if first < 0 else first
            end = x + width
        x += width
    return Region(first, y, (end if is_alike else x) - first, 1)


class Fed(Message):
    """A new sample is there."""

    def __init__(self, data: TopData) -> None:
        super().__init__()
        self.data = data


class Failed(Message):
    """Sampling ended with an error inside capd."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class TopApp(App[None]):
    """The screen of `capd top`.

    Attributes:
        view: What the user changes by keys.
        lines: The frame that is shown.
        failure: The error that ended the application; None if none did.
    """

    # Two parts, because Textual writes a line from the beginning of its widget: what changes on the right costs nothing
    # on the left.
    CSS = """
    Screen { overflow: hidden; layout: horizontal; }
    FrameWidget { width: 1fr; height: 100%; }
    """
    ENABLE_COMMAND_PALETTE = False
    TITLE = "capd top"

    def __init__(self, endpoint: Path, *, run: str | None = None, interval_s: float = 1.0) -> None:
        """Prepare the screen.

        Args:
            endpoint: The path of the daemon's socket.
            run: The run to show; None shows the newest one with live ranks.
            interval_s: The seconds between two samples.
        """
        # The colours are the terminal's own, which also take fewer bytes.
        super().__init__(ansi_color=True)
        self.view = TopView(run_id=run)
        self.failure: Exception | None = None
        self._feed = TopFeed(endpoint, run, interval_s, self._fed, self._failed)
        # The newest sample, and the one that is shown: they differ while the screen is paused.
        self._newest = TopData()
        self._shown = TopData()
        self.lines: list[Line] = []

    @property
    def shown(self) -> TopData:
        """The sample that is shown."""
        return self._shown

    def compose(self) -> ComposeResult:
        """Fill the screen with the parts of a frame."""
        # The terminal tells its size before the parts have theirs: what is drawn in between may not fit.
        yield FrameWidget(self.draw)
        yield FrameWidget(self.draw)

    def on_mount(self) -> None:
        """Begin to sample."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            # The terminal is left as it was.
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self.exit)
        self._feed.start()

    def on_unmount(self) -> None:
        """Stop sampling."""
        self._feed.stop()

    def on_fed(self, message: Fed) -> None:
        """Show a sample, unless the screen is paused."""
        self._follow_terminal()
        self._newest = message.data
        if not self.view.paused:
            self._shown = message.data
            self.draw()

    def on_failed(self, message: Failed) -> None:
        """End with the error of the feed."""
        self._handle_exception(message.error)

    async def on_event(self, event: events.Event) -> None:
        """Take keys before Textual's own bindings, which would move its focus."""
        if isinstance(event, events.Key) and self.is_running:
            self._press(event)
            return
        await super().on_event(event)

    def on_paste(self, event: events.Paste) -> None:
        """Take text for the filter."""
        self.view.paste(event.text)
        self.draw()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the mouse is."""
        self.view.click(event.screen_x, event.screen_y, self._shown)
        self._ask()
        self.draw()

    def draw(self) -> None:
        """Draw what is known now."""
        parts = list(self.query(FrameWidget))
        width, height = self.size
        if len(parts) != 2 or not width or not height:
            return
        self.lines = frame(self.view, self._shown, width, height)
        middle = self.view.middle
        both = [divided(line, middle or width) for line in self.lines]
        parts[0].styles.width = middle or "1fr"
        parts[1].display = bool(middle)
        parts[0].show([left for left, _ in both])
        parts[1].show([right for _, right in both])

    def _press(self, event: events.Key) -> None:
        was_paused = self.view.paused
        if not self.view.press(event.key, event.character if event.is_printable else None, self._shown):
            self.exit()
            return
        if was_paused and not self.view.paused:
            self._shown = self._newest
        self._ask()
        self.draw()

    def _ask(self) -> None:
        """Have the feed sample what the view shows now."""
        client = self.view.pinned.client if isinstance(self.view.pinned, RankState) else ""
        if (self._feed.run_id, self._feed.client) != (self.view.run_id, client):
            self._feed.run_id, self._feed.client = self.view.run_id, client
            self._feed.hurry()

    def _follow_terminal(self) -> None:
        """Take the size of the terminal if it is another one.

        A signal tells it, and Textual passes it on in a timer. On a busy machine either may be lost.
        """
        if self.is_headless:
            return
        size = Size(*shutil.get_terminal_size())
        if size != self.size:
            self.post_message(events.Resize(size, size))
        elif size != self.screen.outer_size:
            self.screen.post_message(events.Resize(size, size))

    def _fed(self, data: TopData) -> None:
        # Called from the thread of the feed, which may outlive the screen for a moment.
        with contextlib.suppress(RuntimeError):
            self.post_message(Fed(data))

    def _failed(self, error: Exception) -> None:
        with contextlib.suppress(RuntimeError):
            self.post_message(Failed(error))

    def _handle_exception(self, error: Exception) -> None:
        if self.is_headless:
            # A test wants the traceback.
            super()._handle_exception(error)
            return
        self.failure = error
        self.exit()
