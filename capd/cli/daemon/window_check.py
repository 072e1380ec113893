"""The check of `capd doctor` on the flight recorder: its place, and what a daemon that was killed left in its spool."""

from __future__ import annotations

from collections.abc import Iterator

from capd.cli.daemon.checks import Diagnosis
from capd.cli.output import human_count, human_nbytes
from capd.config import DaemonSettings
from capd_client.process.text import printable

__all__ = ["check_window"]

_NAMED = 3


def check_window(settings: DaemonSettings) -> Iterator[Diagnosis]:
    """Check that the node has the memory and the disk of [window], and that no run waits for its daemon."""
    from capd.window.place import memory_limit, place_problem

    window = settings.window
    if window is not None:
        detail = (
            f"{human_count(window.iterations, 'iteration')} in {human_nbytes(window.nbytes)}, "
            f"{human_nbytes(memory_limit(window))} of it in memory"
        )
        problem = place_problem(window, settings.store.absolute(), settings.keep_free)
        if problem:
            yield Diagnosis("recorder", "fail", detail, problem)
        else:
            yield Diagnosis("recorder", "ok", detail)
    yield from _left(settings)


def _left(settings: DaemonSettings) -> Iterator[Diagnosis]:
    from capd.lifecycle.inventory import run_paths
    from capd.server.daemon import node_name
    from capd.store.disk.run_lock import is_written
    from capd.store.keeps.held_files import describe_left, left_segments

    node = node_name(settings.node)
    found = [run for run in run_paths(settings.store) if next(left_segments(run, node), None) is not None]
    left = [run for run in found if not is_written(run)]
    for run in left[:_NAMED]:
        text = describe_left(list(left_segments(run, node)))
        detail, _, fix = text.partition("; ")
        yield Diagnosis("held records", "warn", f"{printable(run.stem)}: {detail}", fix)
    if len(left) > _NAMED:
        yield Diagnosis("held records", "warn", f"{human_count(len(left) - _NAMED, 'further run')} as well")
