"""Groups the series of a run by the tensor of which they hold parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from capd.errors import ContradictoryParts
from capd.store.logical.identity import Identity, identity_of
from capd.store.logical.parts import PartSeries
from capd.store.logical.ranks import KnownRanks
from capd.store.logical.series import LogicalSeries
from capd_client.protocol.key import Key

__all__ = ["logical_series"]


def logical_series(
    series: Iterable[PartSeries], ranks: KnownRanks, wanted: Callable[[Key, str], bool] = lambda *_: True
) -> list[LogicalSeries]:
    """Return the tensors of which some series hold parts, in order of their names.

    Args:
        series: The series.
        ranks: The ranks of the run.
        wanted: Whether a key and a path are selected. A tensor is returned if its own key is selected, or that of any
            of its parts.

    Raises:
        ContradictoryParts: The attributes of a selected series are not what docs/logical.md says. The message names it.
    """
    groups: dict[Identity, list[PartSeries]] = {}
    chosen: set[Identity] = set()
    for one in series:
        try:
            identity = identity_of(one.key, one.dtype, one.attributes)
        except ContradictoryParts as error:
            if wanted(one.key, one.path):
                raise ContradictoryParts(f"{one.path}: {error}") from None
            continue
        groups.setdefault(identity, []).append(one)
        own_name = msgspec.structs.replace(identity.key, rank=one.key.rank)
        if wanted(one.key, one.path) or wanted(own_name, one.path):
            chosen.add(identity)
    found = [
        LogicalSeries(own, parts, ranks)
        for identity in chosen
        for own, parts in _told_apart(identity, groups[identity])
    ]
    return sorted(found, key=lambda one: (one.key.layer is None, one.key.layer or 0, one.name, one.dtype))


def _told_apart(identity: Identity, parts: list[PartSeries]) -> list[tuple[Identity, list[PartSeries]]]:
    """Return the group as it is, or one group for each rank if nothing says how the ranks are related."""
    silent = not any(name.endswith("_size") for one in parts for name in one.attributes)
    by_rank: dict[int, list[PartSeries]] = {}
    for one in parts:
        by_rank.setdefault(one.key.rank, []).append(one)
    if not silent or len(by_rank) == 1:
        return [(identity, parts)]
    return [
        (identity._replace(coordinates=(("rank", rank),)), mine) for rank, mine in sorted(by_rank.items())
    ]
