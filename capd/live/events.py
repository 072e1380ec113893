"""The events between two samples: daemons, runs and ranks that come and go, and captures that are lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from capd.live.state import LiveSample, NodeState, RankState, RunState
from capd_client.process.text import number_ranges

__all__ = ["MAX_EVENTS", "EventLog", "LiveEvent", "Severity"]

MAX_EVENTS = 200
"""The most events that a log keeps."""
Severity = Literal["info", "warning", "critical"]
# Drops of one reason are reported again after this time.
_REPEAT_S = 10.0


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """One event. The text has names from outside.

    Attributes:
        run: The run that it belongs to; "" for the daemon's own.
        is_alert: Whether a rule said so.
    """

    time_ns: int
    severity: Severity
    text: str
    run: str = ""
    is_alert: bool = False


class EventLog:
    """The last MAX_EVENTS events, the newest last."""

    def __init__(self) -> None:
        self._events: deque[LiveEvent] = deque(maxlen=MAX_EVENTS)
        # Run and reason, when it was reported last, and the count then.
        self._reported: dict[tuple[str, str], tuple[float, int]] = {}
        self.total = 0

    @property
    def events(self) -> tuple[LiveEvent, ...]:
        """The events, the newest last."""
        return tuple(self._events)

    def compare(self, before: LiveSample, after: LiveSample, now: float, time_ns: int) -> None:
        """Add the events between two samples."""
        for severity, text, run in self._between(before, after, now):
            self.total += 1
            self._events.append(LiveEvent(time_ns, severity, text, run))

    def _between(
        self, before: LiveSample, after: LiveSample, now: float
    ) -> Iterator[tuple[Severity, str, str]]:
        if after.gone:
            if not before.gone:
                yield "critical", after.problem, ""
            return
        node = after.node
        if node is None:
            return
        if before.gone and before.node is not None:
            again = "answers again" if before.node.pid == node.pid else f"was started again (pid {node.pid})"
            yield "info", f"the daemon {again}", ""
        known = {} if before.node is None else {run.run_id: run for run in before.node.runs}
        for run in node.runs:
            is_first = before.node is None
            yield from _of_ranks(known.get(run.run_id), run, is_first=is_first)
            yield from self._of_drops(run, now, is_first=is_first)
        shown = {run.run_id for run in node.runs}
        self._reported = {key: value for key, value in self._reported.items() if key[0] in shown}
        yield from _of_upload(before.node, node)

    def _of_drops(self, run: RunState, now: float, *, is_first: bool) -> Iterator[tuple[Severity, str, str]]:
        for reason, count in sorted(run.dropped.items()):
            at, reported = self._reported.get((run.run_id, reason), (-_REPEAT_S, 0))
            if count < reported:
                # The run was opened by another daemon.
                at, reported = -_REPEAT_S, 0
            if count == reported or now - at < _REPEAT_S:
                continue
            self._reported[run.run_id, reason] = now, count
            why = f": {run.why_full}" if reason == "disk_full" and run.why_full else ""
            so_far = " so far" if is_first else ""
            yield "warning", f"{count - reported:,} captures dropped{so_far}, {reason}{why}", run.run_id


def _of_ranks(
    before: RunState | None, run: RunState, *, is_first: bool
) -> Iterator[tuple[Severity, str, str]]:
    known = {} if before is None else {rank.client: rank for rank in before.ranks}
    came: list[RankState] = []
    changed: dict[tuple[str, str], list[RankState]] = {}
    for rank in run.ranks:
        old = known.get(rank.client)
        if old is None:
            came.append(rank)
            # It came and died between two samples.
            if before is not None and rank.state == "died":
                changed.setdefault((rank.state, rank.end), []).append(rank)
        elif old.state != rank.state:
            changed.setdefault((rank.state, rank.end), []).append(rank)
    live = [rank for rank in came if rank.state in ("live", "lost")]
    if live:
        yield "info", f"{_named(live)} {'here' if is_first else 'joined'}", run.run_id
    for (state, end), ranks in changed.items():
        severity, word = _CHANGES[state]
        yield severity, f"{_named(ranks)} {word}{f' ({end})' if end else ''}", run.run_id


_CHANGES: dict[str, tuple[Severity, str]] = {
    "live": ("info", "connected again"),
    "lost": ("warning", "lost the connection"),
    "ended": ("info", "left"),
    "died": ("critical", "died"),
}


def _named(ranks: Iterable[RankState]) -> str:
    numbers = sorted({rank.rank for rank in ranks})
    return f"rank{'s' if len(numbers) != 1 else ''} {number_ranges(numbers)}"


def _of_upload(before: NodeState | None, after: NodeState) -> Iterator[tuple[Severity, str, str]]:
    old = "ok" if before is None or before.upload is None else before.upload.state
    new = "ok" if after.upload is None else after.upload.state
    if new != old and after.upload is not None:
        severity: Severity = {"ok": "info", "failed": "critical"}.get(new, "warning")  # type: ignore[assignment]
        problem = f": {after.upload.problem}" if after.upload.problem else ""
        yield severity, f"uploads are {new}{problem}", ""
