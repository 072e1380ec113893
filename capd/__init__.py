"""capd: the daemon, the command line and the reader.

`capd.open(path)` opens a run for reading. `capd.merge_stats` merges the statistics of records. `capd.run_task`,
`capd.merge_partials` and `capd.partial_document` analyse a run in tasks of `capd plan-tasks`, in any engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capd._version import __version__

if TYPE_CHECKING:
    from capd.distributed.tasks.running import merge_partials, partial_document, run_task

    # Users know this name.
    from capd.open_run import open_run as open  # noqa: A004
    from capd.store.format.statistics import merge_stats

__all__ = ["__version__", "merge_partials", "merge_stats", "open", "partial_document", "run_task"]


def __getattr__(name: str) -> Any:
    if name == "open":
        from capd.open_run import open_run

        return open_run
    if name == "merge_stats":
        from capd.store.format.statistics import merge_stats

        return merge_stats
    if name in ("merge_partials", "partial_document", "run_task"):
        from capd.distributed.tasks import running

        return getattr(running, name)
    raise AttributeError(f"module 'capd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
