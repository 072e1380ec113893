"""The nodes of runs that other processes name: each process opens a run once, and keeps the last ones open."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from capd.errors import CapdError
from capd.store.objects.address import place_of
from capd.store.read.elements import ReadTools
from capd.store.read.source import RunNode, RunSource, source_of

__all__ = ["reopened_node"]

_KEPT = 8
_lock = threading.Lock()
_open: OrderedDict[str, tuple[RunSource, ReadTools]] = OrderedDict()


def reopened_node(place: str, node: str, wanted: Mapping[str, int]) -> tuple[RunNode, ReadTools]:
    """Return a node of a run that has at least the wanted records, and the caches to read it with.

    Args:
        place: The path or address of the run.
        node: The name of the node.
        wanted: The records by the path of their series.

    Raises:
        NotAStore: There is no run.
        CapdError: It has no such node or series, or fewer records.
    """
    with _lock:
        if place in _open:
            _open.move_to_end(place)
        else:
            _open[place] = (source_of(place_of(place)), ReadTools())
            while len(_open) > _KEPT:
                _open.popitem(last=False)
        source, tools = _open[place]
        found = _among(source.opened, node, wanted) or _among(source.nodes(), node, wanted)
        if found is not None:
            return found, tools
    path, records = next(iter(wanted.items()))
    raise CapdError(
        f"{place} has no {records} records of {path} by node {node!r} here; does this machine see the same run?"
    )


def _among(nodes: Sequence[RunNode], node: str, wanted: Mapping[str, int]) -> RunNode | None:
    for one in nodes:
        if one.name == node and all(
            path in one.series and one.series[path].records >= records for path, records in wanted.items()
        ):
            return one
    return None
