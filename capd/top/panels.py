"""The panels of the screen: drops, one rank, events, and the help."""

from __future__ import annotations

import time
from collections.abc import Sequence

from capd.drops import REMEDIES
from capd.live.events import LiveEvent
from capd.live.state import RankState, RunState, rank_state_word
from capd.top.lines import Line, Span, facts, line, padded, rule, wrapped
from capd.top.text import amount, count, safe, spark, speed

__all__ = ["HELP", "drop_lines", "event_lines", "help_lines", "rank_lines"]

_SEVERITIES = {"info": "", "warning": "yellow", "critical": "bold red"}

HELP = (
    ("q", "quit"),
    ("p", "pause the screen; sampling goes on"),
    ("s", "sort by the next column"),
    ("/", "filter ranks and records; * and ? are wildcards in names of records; Esc clears"),
    ("r", "the next run"),
    ("d", "drops by reason, with what to do"),
    ("t", "show or hide the newest records"),
    ("Tab", "go to the other list"),
    ("↑ ↓ PgUp PgDn Home End", "move the cursor"),
    ("Enter", "details of the rank or the record under the cursor"),
    ("Esc", "close, or clear the filter"),
    ("?", "this help"),
)


def help_lines(width: int) -> list[Line]:
    """Return the keys and what the columns mean."""
    keys = min(24, max(len(key) for key, _ in HELP) + 2)
    lines = [rule("keys", width)]
    for key, text in HELP:
        rows = wrapped(text, max(8, width - keys))
        lines += [
            padded((Span(f"{key if at == 0 else '':<{keys}}", "bold"), *row), width)
            for at, row in enumerate(rows)
        ]
    lines.append(rule("columns", width))
    for text in (
        "behind: the steps that the front rank of the run is ahead",
        "rec/s: records committed per second, over the last five seconds",
        "in flight: offered, and neither committed nor dropped",
        "arena: the share of the rank's arena that holds captures which the daemon has and did not commit",
        "dropped: lost captures; those that your settings leave out are not among them",
        "room: what captures may still take, by the free space above keep_free and by max_disk",
    ):
        lines += wrapped(text, width, indent=2)
    return lines


def drop_lines(run: RunState | None, rank: RankState | None, width: int) -> list[Line]:
    """Return the drops of a run and of one rank by reason, and what to do."""
    if run is None:
        return [line("no run yet", width, "dim")]
    lines = [rule("dropped", width)]
    if not run.dropped:
        lines.append(line("nothing was dropped", width, "green"))
    for reason, number in sorted(run.dropped.items(), key=lambda pair: -pair[1]):
        own = (
            f", {count(rank.dropped.get(reason, 0))} of them by rank {rank.rank}" if rank is not None else ""
        )
        lines.append(line(f"{count(number)} {safe(reason)}{own}", width, "red"))
        remedy = (
            run.why_full if reason == "disk_full" and run.why_full else REMEDIES.get(reason, "see the log")
        )
        lines += wrapped(f"  {safe(remedy)}", width, "dim", indent=2)
    if run.left_out:
        lines.append(rule("left out, as your settings say", width))
        lines += [
            line(f"{count(number)} {safe(reason)}", width) for reason, number in sorted(run.left_out.items())
        ]
    return lines


def rank_lines(rank: RankState, rates: Sequence[float | None], width: int) -> list[Line]:
    """Return everything that is known of one rank."""
    step = "before its first step" if rank.iteration is None else f"step {rank.iteration:,}"
    behind = "" if not rank.behind else f", {rank.behind:,} behind"
    lines = [
        rule(f"rank {rank.rank}", width),
        *facts([f"{rank_state_word(rank)}, {step}{behind}"], width),
        *facts([f"host {safe(rank.host)}", f"pid {rank.pid}", f"attempt {rank.attempt}"], width),
        *facts(
            [
                f"offered {rank.offered:,}",
                f"committed {rank.committed:,}",
                f"in flight {rank.in_flight:,}",
                f"{speed(rank.rate)} records/s",
            ],
            width,
        ),
        *facts([f"arena {amount(rank.arena_bytes)}", f"{amount(rank.arena_used)} hold open captures"], width),
        padded((Span("60 s ", "dim"), Span(spark(rates[-max(10, width - 6) :]), "cyan")), width),
    ]
    for reason, number in sorted({**rank.dropped, **rank.left_out}.items(), key=lambda pair: -pair[1]):
        is_lost = reason in rank.dropped
        lines.append(
            line(
                f"{count(number)} {'dropped' if is_lost else 'left out'}: {safe(reason)}",
                width,
                "red" if is_lost else "",
            )
        )
    return lines


def _clock(time_ns: int) -> str:
    """Return the time of an event, with its day if that is not today."""
    then = time.localtime(time_ns / 1e9)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%m-%d %H:%M", then)


def event_lines(events: Sequence[LiveEvent], width: int, height: int) -> list[Line]:
    """Return the last events, the newest last, in exactly `height` lines with a title."""
    if height <= 0:
        return []
    shown = events[-(height - 1) :] if height > 1 else ()
    lines = [rule("events", width)]
    for event in shown:
        run = f"{safe(event.run)}: " if event.run else ""
        mark = f"{event.severity} alert, " if event.is_alert else ""
        text = f"{_clock(event.time_ns)} {run}{mark}{safe(event.text)}"
        lines.append(line(text, width, _SEVERITIES[event.severity]))
    lines += [line("", width)] * (height - len(lines))
    return lines
