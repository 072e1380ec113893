"""The counters of a run as people read them: a block of lines, or one line of a watch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from capd.cli.output import human_count, human_nbytes
from capd.cli.table import Column, drawn, prose
from capd.drops import describe_drops, left_out, lost
from capd_client.process.text import printable

if TYPE_CHECKING:
    from capd.cli.store.counters import Counters
    from capd.metrics import AlertStats, QuotaUse, SessionStats, UploadStats, WindowStats

__all__ = ["one_line", "render", "which_run"]

_LABEL = len("statistics  ")


def render(counters: Counters, *, wide: bool = False) -> tuple[list[str], list[str]]:
    """Return the counters as lines for people, and the names of the columns that do not fit the terminal.

    If captures were lost, the first line says so.
    """
    losses, chosen = describe_drops(counters.dropped, counters.why_full), left_out(counters.dropped)
    lines = [
        *([losses] if losses else []),
        f"run         {which_run(counters)}",
        f"offered     {human_count(counters.offered)}",
        f"committed   {human_count(counters.committed)}",
        f"in flight   {human_count(counters.in_flight)}",
        f"dropped     {_by_reason(lost(counters.dropped))}",
        *([f"left out    {_by_reason(chosen)}"] if chosen else []),
        *([f"statistics  {_statistics(counters)}"] if counters.statistics_records else []),
        *(
            [f"scalars     {human_count(counters.scalar_records)} of {human_count(counters.records)} records"]
            if counters.scalar_records
            else []
        ),
        *([f"lab         {_lab(counters)}"] if counters.error_records or counters.lab is not None else []),
        f"stored      {_stored(counters)}",
    ]
    if counters.rate_mib_s is not None:
        lines.append(f"rate        {counters.rate_mib_s:.1f} MiB/s")
    if counters.window is not None:
        lines += _window(counters.window)
    lines += [f"quota       {_quota(use)}" for use in counters.quotas]
    kept = "" if counters.keep_free is None else f" ({human_nbytes(counters.keep_free)} are kept free)"
    if counters.disk_free is not None:
        lines.append(f"disk left   {human_nbytes(counters.disk_free)}{kept}")
    if counters.upload is not None:
        lines.append(f"upload      {_upload(counters.upload)}")
    if counters.alerts is not None:
        lines.append(f"alerts      {_alerts(counters.alerts)}")
    if counters.source == "store" and counters.run_alerts != 0:
        lines.append(f"alerts      {_stored_alerts(counters)}")
    if not counters.clean:
        lines.append(
            "unclean     rank and daemon were both killed; the last second of counting may be missing"
        )
    table, unfit = drawn(_session_columns(counters), wide=wide) if counters.sessions else ([], [])
    return [*prose(lines, _LABEL, wide=wide), *([""] if table else []), *table], unfit


def _quota(use: QuotaUse) -> str:
    whose = f" of {printable(use.of)}" if use.of else ""
    share = 100 * use.used // max(1, use.max)
    return f"{use.limit}{whose}: {human_nbytes(use.used)} of {human_nbytes(use.max)} ({share} %)"


def _upload(upload: UploadStats) -> str:
    failed = sum(upload.failures.values())
    waits = f"{human_nbytes(upload.backlog_bytes)} wait" if upload.backlog_bytes else "nothing waits"
    since = f", the oldest for {upload.oldest_s:,.0f} s" if upload.backlog_bytes else ""
    parts = [
        f"{human_count(upload.objects, 'object')} ({human_nbytes(upload.bytes)}) to {printable(upload.to)}",
        waits + since,
        *([f"{human_nbytes(upload.moved_bytes)} moved"] if upload.moved_shards else []),
        *([f"{human_count(upload.kept_shards, 'shard')} kept, see the log"] if upload.kept_shards else []),
        *([human_count(failed, "failure")] if failed else []),
        *([f"{upload.state}: {printable(upload.problem)}"] if upload.problem else []),
        *([printable(upload.note)] if upload.note else []),
    ]
    return "; ".join(parts)


def _alerts(found: AlertStats) -> str:
    left_out = found.records_left_out + found.errors_left_out
    last = f"; the last: {found.last_run}: {found.last}" if found.last else ""
    parts = [
        f"{human_count(found.alerts, 'alert')} of {human_count(found.rules, 'rule')}",
        *([f"{human_count(found.suppressed)} suppressed"] if found.suppressed else []),
        *([f"{human_count(left_out, 'record')} not judged"] if left_out else []),
        *([f"{human_count(found.not_stored, 'alert')} not stored, see the log"] if found.not_stored else []),
        *(
            [f"{human_count(found.commands_failed, 'command')} failed, see the log"]
            if found.commands_failed
            else []
        ),
    ]
    return printable(", ".join(parts) + last)


def _stored_alerts(counters: Counters) -> str:
    if counters.run_alerts is None:
        return "they cannot be read; `capd verify` says why"
    return printable(f"{human_count(counters.run_alerts, 'alert')}; the last: {counters.last_alert}")


def _lab(counters: Counters) -> str:
    """Return what the lab measured of the run, and what the daemon left out of the sample since its start."""
    parts = [f"errors of {human_count(counters.error_records, 'record')} measured while capturing"]
    if (lab := counters.lab) is not None:
        reasons = {name: count for name, count in lab.records.items() if count and name != "measured"}
        parts += [f"daemon left out {_by_reason(reasons)}"] if reasons else []
        parts += [f"{human_count(lab.waiting)} wait"] if lab.waiting else []
        parts += [printable(lab.problem)] if lab.problem else []
    return "; ".join(parts)


def _window(found: WindowStats) -> Iterator[str]:
    """Yield what the flight recorder holds, and a line for each of its last keeps."""
    held = "nothing held"
    if found.first is not None:
        numbers = f" {found.first}" if found.first == found.last else f"s {found.first} to {found.last}"
        records = "" if found.held_records is None else f", {human_count(found.held_records, 'record')}"
        held = f"iteration{numbers} held{records}, {human_nbytes(found.memory_bytes)} in memory and "
        held += f"{human_nbytes(found.disk_bytes)} on disk"
    yield f"window      {held}; {human_count(found.expired, 'record')} let go; {human_count(found.keeps_total, 'keep')}"
    if found.keeps_total > len(found.keeps):
        yield f"kept        {human_count(found.keeps_total - len(found.keeps))} earlier ones are not listed"
    for keep in found.keeps:
        attempt = f", attempt {keep.attempt}" if keep.attempt else ""
        yield (
            f"kept        iterations {keep.first} to {keep.last}: {printable(keep.reason)} at iteration "
            f"{keep.iteration} (node {printable(keep.node)}{attempt})"
        )


def _by_reason(counts: Mapping[str, int]) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in sorted(counts.items())]
    total = human_count(sum(counts.values()))
    return f"{total} ({', '.join(reasons)})" if reasons else total


def _stored(counters: Counters) -> str:
    ratio = counters.compression_ratio
    shown = f", ratio {ratio:.2f}" if ratio is not None else ""
    return f"{human_nbytes(counters.stored_bytes)} of {human_nbytes(counters.raw_bytes)} raw{shown}"


def _statistics(counters: Counters) -> str:
    return f"{human_count(counters.statistics_records)} of {human_count(counters.records)} records keep nothing else"


def _session_columns(counters: Counters) -> list[Column]:
    sessions = sorted(counters.sessions, key=lambda s: (s.attempt, s.rank))

    def numbers(name: str, counts: Iterable[int], spare: int = 0) -> Column:
        return Column(name, [human_count(count) for count in counts], right=True, spare=spare)

    return [
        numbers("rank", (session.rank for session in sessions)),
        numbers("attempt", (session.attempt for session in sessions), 4),
        Column("host", [session.host for session in sessions], is_name=True, spare=2),
        Column("pid", [str(session.pid) for session in sessions], right=True, spare=3),
        Column("state", [_state(session) for session in sessions], is_name=True),
        numbers("offered", (session.offered for session in sessions)),
        numbers("committed", (session.committed for session in sessions)),
        numbers("in flight", (session.in_flight for session in sessions)),
        numbers("dropped", (sum(lost(session.dropped).values()) for session in sessions)),
        numbers("left out", (sum(left_out(session.dropped).values()) for session in sessions), 1),
    ]


def _state(session: SessionStats) -> str:
    how = f" ({session.end})" if session.end else ""
    return f"{session.state}{how}{'' if session.clean else ', unclean'}"


def which_run(counters: Counters) -> str:
    """Return the run, whether it lives, and where it is."""
    if counters.source != "daemon":
        state = "from the store; no daemon writes it"
    else:
        is_live = any(session.state == "live" for session in counters.sessions)
        state = "live" if is_live else "its ranks have left"
    return f"{counters.run_id} ({state}; {counters.path})"


def one_line(counters: Counters, *, gone: bool) -> str:
    """Return the counters now in one line. `gone`: the daemon that sent them is gone."""
    chosen, reduced = sum(left_out(counters.dropped).values()), counters.statistics_records
    rate = "" if counters.rate_mib_s is None else f" rate={counters.rate_mib_s:.1f}MiB/s"
    left = counters.disk_free
    return (
        f"{time.strftime('%H:%M:%S')} {'daemon gone ' if gone else ''}offered={counters.offered}"
        f" committed={counters.committed} in_flight={counters.in_flight} dropped={sum(lost(counters.dropped).values())}"
        f"{f' left_out={chosen}' if chosen else ''}"
        f"{f' statistics={reduced}' if reduced else ''}"
        f" raw={human_nbytes(counters.raw_bytes).replace(' ', '')}"
        f" stored={human_nbytes(counters.stored_bytes).replace(' ', '')}{rate}"
        f"{'' if left is None else f' disk_left={human_nbytes(left)}'.replace(' B', 'B')}"
    )
