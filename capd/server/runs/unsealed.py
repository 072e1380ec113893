"""The records that a daemon leaves unsealed when it ends: which runs, how many records, and how to go on.

Nothing is lost: the records are in the spool, and capd's own readers find them. Plain Zarr readers do not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from capd.errors import CapdError, NotAStore
from capd.store.read.node import NodeView

__all__ = ["EXIT_UNSEALED", "describe_unsealed", "find_unsealed", "spools"]

logger = logging.getLogger(__name__)

EXIT_UNSEALED = 8
# Added to the time to shut down. A spool that takes longer to read stays uncounted.
_COUNT_S = 5.0
_NAMED = 8


def spools(root: Path, node: str) -> Iterator[tuple[str, Path]]:
    """Yield the run id and path of each spool of the node below the store root that holds any file."""
    for spool in sorted(root.glob(f"*.zarr/.capd/node={node}/spool")):
        try:
            if any(spool.iterdir()):
                yield spool.parents[2].name.removesuffix(".zarr"), spool
        except OSError as error:
            logger.error("%s cannot be read: %s", spool, error)


def find_unsealed(
    root: Path, node: str, opened: Callable[[str], int | None], limit_s: float = _COUNT_S
) -> dict[str, int | None]:
    """Return the runs with committed records that plain Zarr readers do not see, and the number of these records.

    Args:
        root: The store root.
        node: The name of this node.
        opened: Returns the number for a run that the daemon has opened itself; None for another run.
        limit_s: The time to count the records of the other runs.

    Returns:
        Run id → records; None if the records could not be counted in time.
    """
    found: dict[str, int | None] = {}
    others: dict[str, Path] = {}
    for run_id, spool in spools(root, node):
        found[run_id] = opened(run_id)
        if found[run_id] is None:
            others[run_id] = spool
    if others:
        # The thread may be abandoned: somebody waits for the daemon's end, and a slow disk may be why it is late.
        counting = threading.Thread(target=_count, args=(others, found), name="capd-count", daemon=True)
        counting.start()
        counting.join(limit_s)
    return {run_id: count for run_id, count in list(found.items()) if count != 0}


def describe_unsealed(left: Mapping[str, int | None], root: Path, node: str) -> str:
    """Return one line for people: the rest that is not sealed, and the commands that seal it."""
    known = sum(count or 0 for count in left.values())
    total = f"{known:,} record{'' if known == 1 else 's'}"
    if None in left.values():
        total = f"at least {total}" if known else "records"
    names = [_named(run_id, count) for run_id, count in left.items()]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"stopped before everything was sealed: plain Zarr readers do not see {total} yet, of "
        f"run{'' if len(names) == 1 else 's'} {', '.join(names[:_NAMED])}{more}. Nothing is lost: "
        f"`capd serve --store {root}` recovers and seals them, and `capd verify {root} --adopt {node}` "
        "does it at once"
    )


def _named(run_id: str, count: int | None) -> str:
    return f"{run_id} (not counted)" if count is None else f"{run_id} ({count:,})"


def _count(spools: Mapping[str, Path], found: dict[str, int | None]) -> None:
    for run_id, spool in spools.items():
        try:
            view = NodeView(spool.parents[2], spool.parent)
            found[run_id] = sum(max(0, row.records - row.sealed) for row in view.series.values())
        except NotAStore:
            # A newer capd wrote it, so this one must not seal it.
            found[run_id] = 0
        except (OSError, CapdError) as error:
            logger.warning("run %s: its unsealed records cannot be counted: %s", run_id, error)
