"""The watch of `capd stats --watch`: the counters of one run, again and again, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from capd.cli.output import note, print_lines
from capd.cli.redrawn import RedrawnBlock
from capd.cli.store.stats_view import one_line, render, which_run
from capd.cli.table import prose
from capd.errors import EndpointError

if TYPE_CHECKING:
    from capd.cli.store.counters import Counters, Source

__all__ = ["watch_counters"]

_RESIZED = {signal.SIGWINCH}


def watch_counters(source: Source, interval_s: float, *, as_json: bool, wide: bool) -> None:
    """Print the counters every `interval_s` seconds: as JSON, as a block in its place on a terminal, or as lines.

    The run is the first one that a daemon has, until then the newest one in the store. The watch goes on after its end,
    and after the daemon's.

    Raises:
        EndpointError: Nothing could be read at first. So do the other errors of `Source.read`.
    """
    refreshes = _refreshes(source, interval_s)
    if as_json:
        for counters, _ in refreshes:
            print_lines([counters.model_dump_json()])
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        block = RedrawnBlock()
        for counters, gone in refreshes:
            why = "daemon gone; the last counters known:" if gone else source.instead
            block.draw([*prose([why] if why else [], 0, wide=wide), *render(counters, wide=wide)[0]])
    else:
        said = ""
        for counters, gone in refreshes:
            if counters.run_id != said:
                said = counters.run_id
                note(f"run {which_run(counters)}{source.instead and '; '}{source.instead}")
            print_lines([one_line(counters, gone=gone)])


def _refreshes(source: Source, interval_s: float) -> Iterator[tuple[Counters, bool]]:
    """Yield the counters repeatedly, with whether the daemon that sent them is gone. Another size ends a pause."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _RESIZED)
    seen_daemon = False
    counters: Counters | None = None
    while True:
        try:
            counters = source.read()
        except EndpointError:
            if counters is None:
                raise
        if counters.source == "daemon":
            source.stay_with(counters)
            seen_daemon = True
        yield counters, seen_daemon and bool(source.problem)
        signal.sigtimedwait(_RESIZED, interval_s)
