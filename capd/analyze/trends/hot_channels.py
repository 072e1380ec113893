"""Hot channels: the channels with the most energy, and whether they stay the same over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.exact import ShortSum
from capd.analyze.trends.sums import Floats, Number, TrendSums, mean_of, share_of_all

if TYPE_CHECKING:
    import torch

__all__ = ["HotChannels", "HotSets", "channel_energies"]

_PIECE = 1 << 17
# The hot channels are at most this share of all, so that a set says something.
_MOST_SHARE = 4


@dataclass(slots=True)
class HotChannels(TrendSums):
    """The k channels with the largest Σx² of a step, against those of the step before and of the first step.

    Jaccard = |A ∩ B| / |A ∪ B|, 1 for the same set. Energy share = Σ_hot Σx² / Σx². Several series give the mean of
    their Jaccards, and the share of their energies together.

    Source: CHON, arXiv 2602.02047: hot channels, their persistence over the steps and the size of the top k.
    "LLM.int8()", arXiv 2208.07339, on outlier features of activations. The Jaccards are a choice of capd.

    Attributes:
        steps: The sets: one for each series and step.
        channels: The sum of the numbers of channels over them.
        hot: The sum of k over them.
        pairs: The sets that have a set before them.
        to_previous: Σ of their Jaccard with the set before.
        to_first: Σ of their Jaccard with the first set.
        hot_energy, energy: Σx² over the hot channels, and over all.
    """

    steps: int = 0
    channels: int = 0
    hot: int = 0
    pairs: int = 0
    to_previous: ShortSum = field(default_factory=ShortSum)
    to_first: ShortSum = field(default_factory=ShortSum)
    hot_energy: ShortSum = field(default_factory=ShortSum)
    energy: ShortSum = field(default_factory=ShortSum)

    def numbers(self) -> dict[str, Number]:
        """Return the mean Jaccards, the energy share, and the mean numbers of hot channels and of all."""
        return {
            "sets": self.steps,
            "pairs": self.pairs,
            "channels": self.channels / self.steps if self.steps else None,
            "hot": self.hot / self.steps if self.steps else None,
            "jaccard_previous": mean_of(self.to_previous, self.pairs),
            "jaccard_first": mean_of(self.to_first, self.pairs),
            "energy_percent": share_of_all(self.hot_energy.value, self.energy.value),
        }


def channel_energies(values: torch.Tensor) -> Floats | None:
    """Return Σx² of each index of the last axis over the finite values, float64 [channels].

    None for a tensor without a last axis or without values.
    """
    import torch

    if not values.ndim or not values.numel():
        return None
    rows = values.detach().reshape(-1, values.shape[-1])
    found = np.zeros(rows.shape[1])
    step = max(1, _PIECE // rows.shape[1])
    for start in range(0, len(rows), step):
        x = rows[start : start + step].to(torch.float32).numpy().astype(np.float64)
        found += (np.where(np.isfinite(x), x, 0.0) ** 2).sum(0)
    return found


class HotSets:
    """The sets of hot channels of one series, step by step. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """Begin a series. `most`: k, the number of hot channels; at most a quarter of all channels are hot."""
        self._most = most
        self._iteration: int | None = None
        self._energies: Floats | None = None
        self._first: frozenset[int] | None = None
        self._previous: frozenset[int] | None = None

    def add(self, iteration: int, energies: Floats) -> Iterator[tuple[int, str, HotChannels]]:
        """Add a record of a step. Yields the step before once it has ended.

        The energies of a step's records add up.
        """
        if self._energies is not None and (
            iteration != self._iteration or energies.size != self._energies.size
        ):
            yield from self.close()
        held = self._energies
        self._energies = energies if held is None else held + energies
        self._iteration = iteration

    def close(self) -> Iterator[tuple[int, str, HotChannels]]:
        """Yield the step that is still open. A step of zeros alone has no hot channel."""
        energies, iteration = self._energies, self._iteration
        self._energies = None
        if energies is None or iteration is None or not energies.any():
            return
        number = max(1, min(self._most, energies.size // _MOST_SHARE))
        order = np.argsort(-energies, kind="stable")[:number]
        hot = frozenset(order.tolist())
        found = HotChannels(1, energies.size, number)
        found.hot_energy.add(float(energies[order].sum()))
        found.energy.add(float(energies.sum()))
        if self._previous is not None and self._first is not None:
            found.pairs = 1
            found.to_previous.add(_jaccard(hot, self._previous))
            found.to_first.add(_jaccard(hot, self._first))
        self._first, self._previous = self._first or hot, hot
        yield iteration, "", found


def _jaccard(one: frozenset[int], other: frozenset[int]) -> float:
    return len(one & other) / len(one | other)
