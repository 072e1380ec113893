"""`capd stats`: shows the counters of a run, live from the daemon or as the store persisted them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from capd.cli.options import Wide, flag, option
from capd.cli.output import human_count, human_nbytes, note, print_either, print_lines
from capd.cli.stores import RunOption, StoreArgument
from capd.cli.table import Column, drawn
from capd.drops import describe_drops, left_out, lost
from capd.errors import ConfigError, EndpointError

if TYPE_CHECKING:
    from capd.cli.store.counters import Counters, Source
    from capd.metrics import SessionStats

__all__ = ["stats"]


def stats(
    store: StoreArgument = None,
    run: RunOption = None,
    watch: Annotated[bool, flag("--watch", "Refresh until Ctrl-C, also after the daemon is gone.")] = False,
    interval: Annotated[float, option("--interval", "SECONDS", "Pause between refreshes.", min=0.1)] = 1.0,
    drops: Annotated[
        bool, flag("--drops", "List the drops instead: by key and reason, with iterations.")
    ] = False,
    wide: Wide = False,
    as_json: Annotated[bool, flag("--json", "Print JSON; with --watch one object per line.")] = False,
) -> None:
    """Show the counters of a run: offered, committed, in flight, dropped, rate, compression, disk left.

    The daemon answers (CAPD_ENDPOINT, or the default path) if it writes the run. Otherwise the counters come from
    the store, where they are at most one second old.

    If captures were lost, the first line says how many, why, and which setting to change. Captures that your
    settings leave out (sampled, stopped) have a line of their own.

    --drops lists the drops by key and reason, over all ranks. The counts add up to the counters.

    \b
    Examples:
      capd stats
      capd stats captures --run exp7 --watch
      capd stats captures --drops
    """
    from capd.cli.store.counters import Source

    source = Source(store, run)
    if drops:
        if watch:
            raise ConfigError("give one of --watch and --drops")
        _drops(source, as_json, wide=wide)
        return
    if watch:
        _watch(source, interval, as_json, wide=wide)
        return
    counters = source.read()
    if source.problem and store is None:
        note(f"{source.problem}; these are the counters of the store")
    print_either(counters.model_dump(), render(counters, wide=wide), as_json=as_json)


def _drops(source: Source, as_json: bool, *, wide: bool) -> None:
    """Print the store's ledger. With a live daemon it is at most a second old."""
    from capd.cli.store.drops import drop_lines
    from capd.drops import drops_of
    from capd.store.read.store import open_store

    found = drops_of(open_store(source.read().path).sessions)
    print_either(found, drop_lines(found, wide=wide), as_json=as_json)


def _watch(source: Source, interval_s: float, as_json: bool, *, wide: bool) -> None:
    if as_json:
        for counters, _ in _refreshes(source, interval_s):
            print_lines([counters.model_dump_json()])
    elif sys.stdout.isatty():
        _watch_terminal(source, interval_s, wide=wide)
    else:
        for counters, gone in _refreshes(source, interval_s):
            print_lines([_one_line(counters, gone)])


def _watch_terminal(source: Source, interval_s: float, *, wide: bool) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        for counters, gone in _refreshes(source, interval_s):
            lines = [
                *(["daemon gone; the last counters known:"] if gone else []),
                *render(counters, wide=wide),
            ]
            live.update(Text.from_ansi("\n".join(lines)), refresh=True)


def _refreshes(source: Source, interval_s: float) -> Iterator[tuple[Counters, bool]]:
    """Yield the counters repeatedly, with whether the daemon that sent them is gone."""
    pause = threading.Event()
    seen_daemon = False
    counters: Counters | None = None
    while True:
        try:
            counters = source.read()
        except EndpointError:
            if counters is None:
                raise
        seen_daemon |= counters.source == "daemon"
        yield counters, seen_daemon and bool(source.problem)
        pause.wait(interval_s)


def render(counters: Counters, *, wide: bool = False) -> list[str]:
    """Return the counters as lines for people. If captures were lost, the first line says so."""
    losses, chosen = describe_drops(counters.dropped, counters.why_full), left_out(counters.dropped)
    where = "live" if counters.source == "daemon" else "from the store; no daemon writes it"
    lines = [
        *([losses] if losses else []),
        f"run         {counters.run_id} ({where}; {counters.path})",
        f"offered     {human_count(counters.offered)}",
        f"committed   {human_count(counters.committed)}",
        f"in flight   {human_count(counters.in_flight)}",
        f"dropped     {_by_reason(lost(counters.dropped))}",
        *([f"left out    {_by_reason(chosen)}"] if chosen else []),
        *([f"statistics  {_statistics(counters)}"] if counters.statistics_records else []),
        f"stored      {_stored(counters)}",
    ]
    if counters.rate_mib_s is not None:
        lines.append(f"rate        {counters.rate_mib_s:.1f} MiB/s")
    kept = "" if counters.keep_free is None else f" ({human_nbytes(counters.keep_free)} are kept free)"
    lines.append(f"disk left   {human_nbytes(counters.disk_free)}{kept}")
    if not counters.clean:
        lines.append(
            "unclean     rank and daemon were both killed; the last second of counting may be missing"
        )
    return lines + _session_table(counters, wide=wide)


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


def _session_table(counters: Counters, *, wide: bool) -> list[str]:
    sessions = sorted(counters.sessions, key=lambda s: (s.attempt, s.rank))
    if not sessions:
        return []

    def numbers(name: str, counts: Iterable[int], spare: int = 0) -> Column:
        return Column(name, [human_count(count) for count in counts], right=True, spare=spare)

    columns = [
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
    return ["", *drawn(columns, wide=wide)[0]]


def _state(session: SessionStats) -> str:
    how = f" ({session.end})" if session.end else ""
    return f"{session.state}{how}{'' if session.clean else ', unclean'}"


def _one_line(counters: Counters, gone: bool) -> str:
    chosen, reduced = sum(left_out(counters.dropped).values()), counters.statistics_records
    rate = "" if counters.rate_mib_s is None else f" rate={counters.rate_mib_s:.1f}MiB/s"
    return (
        f"{time.strftime('%H:%M:%S')} {'daemon gone ' if gone else ''}offered={counters.offered}"
        f" committed={counters.committed} in_flight={counters.in_flight} dropped={sum(lost(counters.dropped).values())}"
        f"{f' left_out={chosen}' if chosen else ''}"
        f"{f' statistics={reduced}' if reduced else ''}"
        f" raw={human_nbytes(counters.raw_bytes).replace(' ', '')}"
        f" stored={human_nbytes(counters.stored_bytes).replace(' ', '')}{rate}"
        f" disk_left={human_nbytes(counters.disk_free).replace(' ', '')}"
    )
