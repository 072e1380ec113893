"""The source of a Store: a run in a directory of this machine, or in an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from capd.errors import NotAStore
from capd.store.documents.tombstone import check_present
from capd.store.documents.zarr_json import run_attributes
from capd.store.objects.address import Address, RunPlace
from capd.store.read.node import NodeView
from capd.store.remote.node import RemoteNode
from capd.store.remote.run import RemoteRun

__all__ = ["LocalRun", "RunNode", "RunSource", "source_of"]

RunNode: TypeAlias = NodeView | RemoteNode
"""One node's part of a run. Both kinds have the same members for series, sessions and rows."""


class LocalRun:
    """The source of a Store: the nodes of a run in a directory."""

    def __init__(self, place: Path) -> None:
        """Look at a run directory. Raises NotAStore if it is not one."""
        if not place.is_dir():
            check_present(place)
            raise NotAStore(f"{place} is not a run directory; `capd ls` on the store root lists its runs")
        self.place = place
        self._nodes: dict[Path, NodeView] = {}
        # A foreign directory must not be searched for shards.
        self.attributes()

    def nodes(self) -> list[NodeView]:
        """Return the views of all nodes as they are now. If a file only grew, only its new part is read."""
        directories = sorted((self.place / ".capd").glob("node=*"))
        # If only the shards were copied, their journals name their series.
        if not directories:
            directories = [self.place / ".capd" / "node="]
        self._nodes = {one: NodeView(self.place, one, self._nodes.get(one)) for one in directories}
        return list(self._nodes.values())

    @property
    def opened(self) -> list[NodeView]:
        """The views that `nodes` returned last."""
        return list(self._nodes.values())

    def attributes(self) -> dict[str, Any]:
        """Return the `capd` attributes of the run.

        Raises:
            NotAStore: It is not a run that this version can read, or it was removed.
        """
        return run_attributes(self.place)


RunSource: TypeAlias = LocalRun | RemoteRun


def source_of(place: RunPlace) -> RunSource:
    """Return the source of the run at a place.

    Raises:
        NotAStore: There is no run.
        CapdError: It is an address, and the extra `store` is not installed.
    """
    return RemoteRun(place) if isinstance(place, Address) else LocalRun(place)
