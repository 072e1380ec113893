"""Whether a run is finished, and its stamp, which changes with everything that a report reads."""

from __future__ import annotations

import os
from pathlib import Path

from capd.lifecycle.inventory import RunFacts
from capd.store.alerts.file import ALERTS_NAME
from capd.store.catalog.place import live_catalog
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.disk.layout import node_directory, nodes_of

__all__ = ["Stamp", "is_finished", "stamp_of"]

Stamp = tuple[tuple[str, int, int, int], ...]
"""The names, numbers, sizes and times of some files."""

_DOCUMENT = "zarr.json"


def is_finished(facts: RunFacts) -> bool:
    """Return whether nobody captures a run. One that a daemon has open must be sealed, which is soon after its end."""
    if facts.state != "open":
        return facts.state in ("unsealed", "sealed")
    spools = (node_directory(facts.path, node) / "spool" for node in facts.nodes)
    return not any(any(spool.glob("*")) for spool in spools)


def stamp_of(run: Path) -> Stamp:
    """Return the stamp of a run: of its document, and of the catalogs and alerts of its nodes.

    Raises:
        CapdError: The run cannot be read.
    """
    files = [run / _DOCUMENT]
    for node in nodes_of(run):
        directory = node_directory(run, node)
        live = live_catalog(directory)
        files += [
            directory / CATALOG_NAME, directory / ALERTS_NAME, live, live.with_name(f"{live.name}-wal"),
        ]  # fmt: skip
    return tuple(found for found in map(_of, files) if found is not None)


def _of(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    # Readers make an empty log beside a catalog.
    return (str(path), found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None
