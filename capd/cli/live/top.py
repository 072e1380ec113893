"""`capd top`: a live view of a node in the terminal, or one frame of it as text."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any

from capd.cli.completion import run_names
from capd.cli.options import flag, option
from capd.cli.output import print_lines
from capd.errors import CapdError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["top"]

_MISSING = 'capd top needs textual: pip install "capd[tui]"; `capd stats --watch` needs nothing'
# The width of a frame that goes into a pipe.
_PIPE_COLUMNS = 120


def top(
    run: Annotated[
        str | None,
        option(
            "--run",
            "ID",
            "The run to show [default: the newest one with live ranks].",
            autocompletion=run_names,
        ),
    ] = None,
    interval: Annotated[
        float, option("--interval", "SECONDS", "Pause between samples.", min=0.5, max=60.0)
    ] = 1.0,
    once: Annotated[bool, flag("--once", "Print one frame as text, and exit.")] = False,
) -> None:
    """Watch a node in the terminal: its runs, ranks, drops, arenas and disk, and the newest records with statistics.

    The daemon answers (CAPD_ENDPOINT, or the default path). If it is gone, the last values stay, and it is asked
    again until it is back. Without a terminal, this command does what `capd stats --watch` does.

    Keys: q quit, p pause, s sort, / filter, r next run, d drops, t newest records, Tab other list, Enter details,
    ? help.

    \b
    Examples:
      capd top
      capd top --run exp7 --interval 2
      capd top --once

    \b
    Exit codes:
      0  you left the screen, or one frame was printed
      3  --once, and no daemon answers
      5  --once, and the daemon has no such run
    """
    if once:
        from capd.top.once import one_frame

        columns = shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns
        print_lines(one_frame(_endpoint(), run, min(interval, 1.0), max(40, columns)))
    elif not _is_terminal():
        from capd.cli.store.counters import Source
        from capd.cli.store.stats_watch import watch_counters

        watch_counters(Source(None, run), interval, as_json=False, wide=False)
    else:
        _show(_app(run, interval))


def _is_terminal() -> bool:
    # Textual draws on stderr.
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM") != "dumb"


def _endpoint() -> Path:
    from capd.config import load_daemon_settings
    from capd.server.net.endpoint import endpoint_path

    return endpoint_path(load_daemon_settings({}).endpoint)


def _app(run: str | None, interval: float) -> Any:
    """Return the application. Raises CapdError if Textual is not installed."""
    try:
        from capd.top.app import TopApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("textual", "rich"):
            raise
        raise CapdError(_MISSING) from error
    return TopApp(_endpoint(), run=run, interval_s=interval)


def _show(app: Any) -> None:
    app.run()
    if app.failure is not None:
        raise app.failure
