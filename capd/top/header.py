"""The head of the screen: node, run, rates, drops, arenas, disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capd.live.state import LiveSample, NodeState, RunState
from capd.metrics import AlertStats, LabStats
from capd.top.lines import Line, Span, flow, wrapped
from capd.top.text import amount, count, duration, safe, spark, speed
from capd.top.view import TopData

__all__ = ["banner_lines", "header_lines"]

# A disk that is full so soon needs somebody.
_SOON_S = 600.0


def banner_lines(sample: LiveSample, width: int) -> list[Line]:
    """Return the banner of a daemon that does not answer; nothing if it answers."""
    if not sample.gone:
        return []
    if sample.node is None:
        text = f" WAITING FOR THE DAEMON  {safe(sample.problem)}"
    else:
        since = duration(sample.silent_s)
        text = f" DAEMON GONE for {since}; the last values are shown  {safe(sample.problem)}"
    return wrapped(text, width, "bold white on red")[:3]


def header_lines(data: TopData, run: RunState | None, width: int, most: int) -> list[Line]:
    """Return the head of the screen.

    Args:
        data: What is shown.
        run: The run that is shown; None if there is none.
        width: The columns.
        most: The most lines. What is less important is left out.
    """
    node = data.sample.node
    if node is None:
        return flow([_item("capd top", "", "bold")], width, most)
    items = [
        _item("capd top", f"node {safe(node.node)}", "bold"),
        _item("run", _run_text(node, run)),
        *([] if run is None else _of_run(run, data.run_rates, width)),
        *_of_alerts(node.rules, data),
        *_of_disk(node),
    ]
    if run is not None and run.why_full:
        items.append(_item("full", safe(run.why_full), "red"))
    if run is not None:
        items += [
            _item(
                "quota",
                f"{use.limit}{f' of {safe(use.of)}' if use.of else ''} {100 * use.used // max(1, use.max)} %",
            )
            for use in run.quotas[:3]
        ]
    if node.upload is not None:
        style = {"ok": "", "failed": "bold red"}.get(node.upload.state, "yellow")
        items.append(_item("upload", f"{node.upload.state}, {amount(node.upload.backlog_bytes)} wait", style))
    if node.lab is not None:
        items.append(_lab(node.lab))
    items.append(_item("up", duration(node.uptime_s // 10 * 10) if node.uptime_s >= 10 else "a moment"))
    items.append(_item("pid", str(node.pid)))
    return flow(items, width, most)


def _item(label: str, text: str, style: str = "") -> Line:
    return (Span(f"{label} ", "dim" if label != "capd top" else "bold"), Span(text, style))


def _run_text(node: NodeState, run: RunState | None) -> str:
    if run is None:
        waiting = f"; {node.arriving} arriving" if node.arriving else ""
        return f"none yet{waiting}"
    total = len(node.runs) + node.omitted_runs
    place = f" ({node.runs.index(run) + 1} of {total})" if total > 1 else ""
    return f"{safe(run.run_id)}{place}"


def _of_run(run: RunState, rates: Sequence[float | None], width: int) -> list[Line]:
    total = len(run.ranks) + run.omitted_ranks
    step = "-" if run.iteration is None else f"{run.iteration:,}"
    used, size = run.arena
    ratio = f", ratio {run.raw_bytes / run.stored_bytes:.2f}" if run.stored_bytes else ""
    lost = sum(run.dropped.values())
    reasons = ", ".join(f"{count(n)} {name}" for name, n in _by_count(run.dropped)[:3])
    items = [
        _item("ranks", f"{run.live} live of {total}", "" if run.live == total else "yellow"),
        _item("step", step),
        _item("committed", f"{count(run.committed)} {speed(run.rate)}/s {amount(run.nbytes_s)}/s"),
        *([(Span("60 s ", "dim"), Span(spark(rates[-min(60, width - 8) :]), "cyan"))] if rates else []),
        _item("dropped", f"{count(lost)}{f' ({reasons})' if reasons else ''}", "red" if lost else ""),
        _item("in flight", count(run.in_flight)),
    ]
    if size:
        items.append(
            _item("arena", f"{100 * used // size} % of {amount(size)}", "yellow" if 2 * used > size else "")
        )
    if run.left_out:
        items.append(_item("left out", count(sum(run.left_out.values()))))
    items.append(_item("stored", f"{amount(run.stored_bytes)}{ratio}"))
    return items


def _by_count(dropped: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(dropped.items(), key=lambda pair: (-pair[1], pair[0]))


def _of_disk(node: NodeState) -> list[Line]:
    style = ""
    if node.full_in_s is not None and node.full_in_s < _SOON_S:
        style = "bold red"
    elif not node.room:
        style = "red"
    until = "" if node.full_in_s is None else f", full in {duration(node.full_in_s)}"
    fill = "" if node.full_in_s is None else f" at {amount(node.fill_s)}/s"
    items = [_item("room", f"{amount(node.room)}{until}{fill}", style)]
    items.append(_item("disk free", f"{amount(node.disk_free)}, {amount(node.keep_free)} are kept"))
    if node.oldest_s >= 0.05:
        items.append(_item("lag", duration(node.oldest_s), "yellow" if node.oldest_s > 5 else ""))
    return items


def _of_alerts(rules: AlertStats | None, data: TopData) -> list[Line]:
    """Return the number of alerts of the run, and what the rules could not do since the start of the daemon."""
    total = sum(data.alerts.values())
    if rules is None and not total and not data.alerts_problem:
        return []
    critical = data.alerts.get("critical", 0)
    parts = [f"{count(total)}{f' ({count(critical)} critical)' if critical else ''}"]
    style = "bold red" if critical else "yellow" if data.alerts.get("warning") else ""
    failures = [f"cannot be read: {safe(data.alerts_problem)}"] if data.alerts_problem else []
    if rules is not None:
        failures += [f"{count(rules.not_stored)} only in the log"] if rules.not_stored else []
        left_out = rules.records_left_out + rules.errors_left_out
        failures += [f"{count(left_out)} records not judged"] if left_out else []
    return [_item("alerts", ", ".join(parts + failures), style or ("yellow" if failures else ""))]


def _lab(lab: LabStats) -> Line:
    measured = lab.records.get("measured", 0)
    reasons = {name: number for name, number in lab.records.items() if number and name != "measured"}
    parts = [f"{count(measured)} measured"]
    parts += [f"{count(lab.waiting)} wait"] if lab.waiting else []
    if reasons:
        parts.append(f"{count(sum(reasons.values()))} not ({safe(_by_count(reasons)[0][0])})")
    if lab.problem:
        parts.append(safe(lab.problem))
    return _item("lab", ", ".join(parts), "yellow" if lab.problem else "")
