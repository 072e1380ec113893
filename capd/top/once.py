"""One frame of the screen as plain text."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from capd.errors import EndpointError, NothingMatched
from capd.live.state import LiveSample
from capd.top.feed import TopFeed
from capd.top.frame import overview
from capd.top.lines import plain
from capd.top.view import TopData, TopView

__all__ = ["one_frame"]


def one_frame(endpoint: Path, run: str | None, interval_s: float, width: int) -> list[str]:
    """Return one frame as lines of text. It takes two samples, so that rates are known.

    Args:
        endpoint: The path of the daemon's socket.
        run: The run to show; None shows the newest one with live ranks.
        interval_s: The seconds between the samples.
        width: The columns.

    Raises:
        EndpointError: The daemon does not answer.
        NothingMatched: It has no such run.
    """
    view = TopView(run_id=run)
    feed = TopFeed(endpoint, run, interval_s)
    try:
        # Looks at the catalog have pauses, and the frame needs the newest records.
        _checked(feed.take(with_records=False), view)
        time.sleep(interval_s)
        data = feed.take()
        _checked(data, view)
    finally:
        feed.close()
    # A minute has not passed yet.
    return [plain(line) for line in overview(view, replace(data, run_rates=()), width)]


def _checked(data: TopData, view: TopView) -> LiveSample:
    sample = data.sample
    if sample.problem:
        raise EndpointError(sample.problem)
    if view.run_id is not None and view.run(data) is None:
        runs = () if sample.node is None else sample.node.runs
        known = ", ".join(run.run_id for run in runs[-5:]) or "none"
        raise NothingMatched(f"the daemon has no run {view.run_id}; its newest runs: {known}")
    return sample
