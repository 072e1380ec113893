"""The ranks of a run: where each stands, and on which node, so that an error about missing parts can name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from capd.errors import ContradictoryParts
from capd.store.logical.layout import coordinates_of
from capd_client.process.text import printable

__all__ = ["KnownRank", "KnownRanks"]


class KnownRank(NamedTuple):
    """One rank of a run: its node, and its place in the dimensions of the ranks."""

    rank: int
    node: str
    places: Mapping[str, int]

    def __str__(self) -> str:
        return f"rank {self.rank} on node {printable(self.node)}" if self.node else f"rank {self.rank}"


class KnownRanks:
    """The ranks of a run. places: from the attributes of their series. Others are known by their sessions alone."""

    def __init__(
        self,
        series: Iterable[tuple[int, str, Mapping[str, Any]]],
        sessions: Iterable[tuple[int, str, int]] = (),
    ) -> None:
        """Collect the ranks.

        Args:
            series: Rank, node and attributes of the series of the run.
            sessions: Rank, node and the number of ranks of the job, 0 if unknown, of its sessions.
        """
        self._of_rank: dict[int, KnownRank] = {}
        seen: set[tuple[int, int]] = set()
        for rank, node, attributes in series:
            # Most series of a rank share few attributes.
            own = (rank, hash(tuple(sorted(name for name in attributes if name.endswith("_rank")))))
            if own in seen:
                continue
            seen.add(own)
            known = self._of_rank.get(rank) or KnownRank(rank, node, {})
            self._of_rank[rank] = known._replace(places={**known.places, **_places(attributes)})
        self._silent: dict[int, KnownRank] = {}
        self._world = 0
        for rank, node, world in sessions:
            self._world = max(self._world, world)
            if rank not in self._of_rank:
                self._silent[rank] = KnownRank(rank, node, {})

    def at(self, wanted: Mapping[str, int]) -> list[KnownRank]:
        """Return the ranks that stand at this place in the dimensions that they have of it."""
        return [
            known
            for _, known in sorted(self._of_rank.items())
            if all(known.places.get(name) == place for name, place in wanted.items())
        ]

    @cached_property
    def silent(self) -> list[KnownRank]:
        """The ranks without any series: those that were connected, and those of the job that never were."""
        absent = (KnownRank(rank, "", {}) for rank in range(min(self._world, 1 << 17)))
        unknown = {one.rank: one for one in absent if one.rank not in self._of_rank}
        return [one for _, one in sorted({**unknown, **self._silent}.items())]


def _places(attributes: Mapping[str, Any]) -> dict[str, int]:
    try:
        return {name: place for name, (place, _) in coordinates_of(attributes).items()}
    except ContradictoryParts:
        return {}
