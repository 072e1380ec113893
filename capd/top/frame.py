"""One frame of the screen: what is where in a terminal of a given size. Pure: the same state gives the same lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capd.live.records import NewRecord
from capd.live.state import RankState
from capd.top.columns import header_line, row_line, shown_columns
from capd.top.header import banner_lines, header_lines
from capd.top.lines import Line, Span, beside, line, padded, restyled, rule
from capd.top.panels import drop_lines, event_lines, help_lines, rank_lines
from capd.top.ranks import RANK_COLUMNS
from capd.top.records import RECORD_COLUMNS, statistics_lines
from capd.top.text import safe, width_of
from capd.top.view import Focus, ListArea, TopData, TopView

__all__ = ["MIN_COLUMNS", "frame", "overview"]

MIN_COLUMNS = 40
# From here on, ranks and records are beside each other.
_WIDE = 130
# The lines of a record's statistics without its histogram.
_FACTS = 7
# The records of `--once`, and the events.
_LISTED = 20
_KEYS = (
    ("q", "quit"), ("?", "help"), ("p", "pause"), ("s", "sort"), ("/", "filter"), ("r", "run"), ("d", "drops"),
    ("t", "tensors"), ("Tab", "list"), ("Enter", "details"),
)  # fmt: skip


def frame(view: TopView, data: TopData, width: int, height: int) -> list[Line]:
    """Return exactly `height` lines of exactly `width` columns, and note in the view where its lists are."""
    data = view.of_run(data)
    view.areas.clear()
    view.middle = _middle(width) if view.pane and not view.overlay else 0
    run = view.run(data)
    banner = banner_lines(data.sample, width)
    most = max(1, min(6 if width >= 60 else 9, height // 3))
    head = _steady(view, header_lines(data, run, width, most), width, most)
    foot = [_footer(view, data, width)]
    events = event_lines(data.events, width, _event_height(height))
    room = height - len(banner) - len(head) - len(foot) - len(events)
    if room < 3:
        # A terminal of a few lines shows the ranks.
        events, head = [], head[:1]
        room = height - len(banner) - len(head) - len(foot)
    body = _body(view, data, width, max(0, room), len(banner) + len(head))
    rest = [*head, *body, *events]
    if data.sample.gone:
        rest = [restyled(one, "dim") for one in rest]
    lines = [*banner, *rest, *foot]
    lines = lines[: height - 1] + lines[-1:] if height else []
    return [padded(one, width) for one in lines]


def _steady(view: TopView, head: list[Line], width: int, most: int) -> list[Line]:
    """Return the head with as many lines as it ever took at this size: a figure that grows moves nothing else."""
    if view.head[:2] != (width, most):
        view.head = (width, most, 0)
    view.head = (width, most, max(view.head[2], len(head)))
    return _cut(head, width, view.head[2])


def _middle(width: int) -> int:
    return max(74, width * 9 // 20) if width >= _WIDE else 0


def _event_height(height: int) -> int:
    return 0 if height < 14 else min(10, 2 + height // 12)


def _body(view: TopView, data: TopData, width: int, height: int, y: int) -> list[Line]:
    if view.overlay:
        return _overlay(view, data, width, height)
    if not view.pane:
        return _ranks(view, data, width, height, y)
    if left := _middle(width):
        return beside(
            _ranks(view, data, left, height, y),
            _pane(view, data, width - left - 3, height, left + 3, y),
            left,
            width,
        )
    if height < 8:
        focused = _pane if view.focus == "records" or view.pane == "drops" else None
        return (
            _ranks(view, data, width, height, y)
            if focused is None
            else focused(view, data, width, height, 0, y)
        )
    # The ranks take what they need, at most half.
    upper = min(len(view.ranks(data)) + 1, height - height // 2)
    upper = max(upper, 3)
    return [*_ranks(view, data, width, upper, y), *_pane(view, data, width, height - upper, 0, y + upper)]


def _pane(view: TopView, data: TopData, width: int, height: int, x: int, y: int) -> list[Line]:
    if view.pane == "drops":
        return _cut(drop_lines(view.run(data), view.rank_under_cursor(data), width), width, height)
    records = view.records(data)
    facts = height // 2 if records and height >= 2 * (_FACTS + 3) else 0
    lines = _list(view, "records", records, width, height - facts, x, y)
    if facts:
        record = records[view.place("records", records)]
        lines += _cut(statistics_lines(record, width, facts), width, facts)
    if not records and height > 1:
        why = "no record matches the filter" if data.records else safe(data.note) or "no record yet"
        lines[1] = line(f"  {why}", width, "dim")
    return lines


def _ranks(view: TopView, data: TopData, width: int, height: int, y: int) -> list[Line]:
    ranks = view.ranks(data)
    lines = _list(view, "ranks", ranks, width, height, 0, y)
    if not ranks and height > 1:
        run = view.run(data)
        why = "no rank matches the filter" if run is not None and run.ranks else _why_no_rank(view, data)
        lines[1] = line(f"  {why}", width, "dim")
    return lines


def _why_no_rank(view: TopView, data: TopData) -> str:
    if data.sample.node is None:
        return "no daemon has answered yet"
    if view.run_id is not None and view.run(data) is None:
        return f"the daemon has no run {safe(view.run_id)}; r shows the others"
    return "no rank has connected yet"


def _list(
    view: TopView, focus: Focus, items: Sequence[Any], width: int, height: int, x: int, y: int
) -> list[Line]:
    """Return a table of exactly `height` lines."""
    if height <= 0:
        return []
    columns: Any = RANK_COLUMNS if focus == "ranks" else RECORD_COLUMNS
    order = view.rank_order if focus == "ranks" else view.record_order
    shown = shown_columns(columns, width)
    window = view.window(focus, items, height - 1)
    at = view.place(focus, items)
    lines = [header_line(shown, width, order)]
    for number in window:
        cursor = "" if number != at else ("reverse" if view.focus == focus else "underline")
        lines.append(row_line(shown, width, items[number], cursor=cursor))
    view.areas.append(ListArea(focus, x, y + 1, width, len(window), window.start))
    return _cut(lines, width, height)


def _overlay(view: TopView, data: TopData, width: int, height: int) -> list[Line]:
    if view.overlay == "help":
        lines = help_lines(width)
    elif isinstance(view.pinned, RankState):
        run = view.run(data)
        ranks = () if run is None else run.ranks
        # Its newest state, as long as the run has it.
        now = next((rank for rank in ranks if rank.client == view.pinned.client), view.pinned)
        lines = rank_lines(now, data.rank_rates, width)
    elif isinstance(view.pinned, NewRecord):
        lines = statistics_lines(view.pinned, width, -1)
    else:
        lines = []
    view.scroll = max(0, min(view.scroll, len(lines) - height))
    return _cut(lines[view.scroll :], width, height)


def _cut(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    return [*lines[:height], *[line("", width)] * (height - len(lines))]


def _footer(view: TopView, data: TopData, width: int) -> Line:
    if view.typing is not None:
        return padded(
            (
                Span("/", "bold"),
                Span(view.typing),
                Span("▏", "bold"),
                Span("  Enter keeps, Esc undoes", "dim"),
            ),
            width,
        )
    spans: list[Span] = []
    if view.paused:
        spans.append(Span(" PAUSED ", "bold black on yellow"))
    if view.wanted:
        run = view.run(data)
        total = 0 if run is None else len(run.ranks)
        spans.append(
            Span(f" filter {safe(view.wanted)}: {len(view.ranks(data))} of {total} ranks ", "yellow")
        )
    if view.overlay:
        spans += [Span(" Esc", "bold"), Span(" back ", "dim"), Span(" ↑↓", "bold"), Span(" scroll ", "dim")]
    else:
        left = width - sum(width_of(span.text) for span in spans)
        for key, text in _KEYS:
            left -= len(key) + len(text) + 2
            if left < 0:
                break
            spans += [Span(f" {key}", "bold"), Span(f" {text}", "dim")]
    note = data.note if data.records else ""
    taken = sum(width_of(span.text) for span in spans)
    if note and not view.overlay and taken + width_of(note) + 2 <= width:
        spans.append(Span(f"  {safe(note)}", "dim"))
    return padded(tuple(spans), width)


def overview(view: TopView, data: TopData, width: int) -> list[Line]:
    """Return the frame of `--once`: everything once, as many lines as it takes."""
    run, ranks = view.run(data), view.ranks(data)
    shown = shown_columns(RANK_COLUMNS, width)
    lines = [*header_lines(data, run, width, 20), header_line(shown, width, "")]
    lines += [row_line(shown, width, rank) for rank in ranks]
    if not ranks:
        lines.append(line(_why_no_rank(view, data), width))
    if run is not None and run.dropped:
        lines += drop_lines(run, None, width)
    if events := [event for event in data.events if event.is_alert or event.severity != "info"][-_LISTED:]:
        lines += event_lines(events, width, len(events) + 1)
    if data.records:
        columns = shown_columns(RECORD_COLUMNS, width)
        lines += [rule("newest records", width), header_line(columns, width, "")]
        lines += [row_line(columns, width, record) for record in data.records[:_LISTED]]
    return lines
