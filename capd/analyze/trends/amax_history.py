"""What delayed scaling would have made of a series: its scales come from the largest magnitudes of earlier steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capd.analyze.exact import ShortSum
from capd.analyze.trends.sums import Largest, Number, TrendSums, mean_of, share_of_all

__all__ = ["AmaxRecord", "DelayedScales", "DelayedScaling"]


@dataclass(slots=True)
class DelayedScaling(TrendSums):
    """The values beyond the range of a delayed scale, and the part of the range that it left unused.

    The scale of a step is format_max / (max of the amax of the last `window` steps · 2^margin). So the limit of a step
    is L = that max · 2^margin, whatever the format. Overflow: |x| > L, which saturates. Wasted binades:
    log2(L / amax) where amax ≤ L. The first step of a series, and steps after zeros alone, have no limit.

    Source: TransformerEngine, `transformer_engine.common.recipe.DelayedScaling` (`amax_history_len`, `margin`,
    `amax_compute_algo` "max"; "most_recent" is a window of 1). It takes the largest amax over ranks, too; here each
    series is on its own. "Scaling FP8 training to trillion-token LLMs", arXiv 2409.12517, and MOSS, arXiv 2511.05811,
    show amax over steps.

    Attributes:
        steps: The steps with a limit.
        overflowed: Those of them with a value beyond it.
        counted, beyond: The values of the records whose elements are known, and those beyond the limit.
        waste: Σ log2(L / amax) over the steps with 0 < amax ≤ L.
        wasted: The number of these steps.
        most_waste: The largest of them.
        most_excess: The largest log2(amax / L) of a step beyond its limit.
        amax: The largest magnitude of all.
    """

    steps: int = 0
    overflowed: int = 0
    counted: int = 0
    beyond: int = 0
    waste: ShortSum = field(default_factory=ShortSum)
    wasted: int = 0
    most_waste: Largest = field(default_factory=Largest)
    most_excess: Largest = field(default_factory=Largest)
    amax: Largest = field(default_factory=Largest)

    def numbers(self) -> dict[str, Number]:
        """Return shares in percent, and binades (powers of two)."""
        return {
            "judged": self.steps,
            "amax": self.amax.value,
            "overflow_percent": share_of_all(self.beyond, self.counted),
            "overflow_steps_percent": share_of_all(self.overflowed, self.steps),
            "most_excess": self.most_excess.value if self.steps else None,
            "wasted_binades": mean_of(self.waste, self.wasted),
            "most_wasted": self.most_waste.value if self.wasted else None,
        }


class AmaxRecord(NamedTuple):
    """A record: the largest finite magnitude, and all magnitudes if its elements were read."""

    amax: float
    magnitudes: NDArray[np.floating] | None


class DelayedScales:
    """The delayed scales of one series, step by step, for each window and margin. Not thread-safe.

    It holds as many numbers as the longest window.
    """

    def __init__(self, windows: Sequence[int], margins: Sequence[int]) -> None:
        self._settings = [(window, margin) for window in windows for margin in margins]
        self._history: deque[float] = deque(maxlen=max(windows))
        self._iteration: int | None = None
        self._amax = 0.0
        self._open: dict[tuple[int, int], DelayedScaling] = {}

    def add(self, iteration: int, record: AmaxRecord) -> Iterator[tuple[int, str, DelayedScaling]]:
        """Add a record of a step. Yields the step before once it has ended. A step's records share its limit."""
        if self._iteration is not None and iteration != self._iteration:
            yield from self.close()
        self._iteration = iteration
        self._amax = max(self._amax, record.amax)
        for setting in self._settings:
            found = self._open.setdefault(setting, DelayedScaling())
            limit = self._limit(*setting)
            if not limit or record.magnitudes is None:
                continue
            found.counted += record.magnitudes.size
            if record.amax > limit:
                found.beyond += int((record.magnitudes > limit).sum())

    def close(self) -> Iterator[tuple[int, str, DelayedScaling]]:
        """Yield the step that is still open, and let its amax enter the history."""
        if self._iteration is None:
            return
        for setting, found in self._open.items():
            limit = self._limit(*setting)
            found.amax.value = self._amax
            if limit:
                found.steps = 1
                self._judge(found, limit)
            window, margin = setting
            yield self._iteration, f"window={window} margin={margin}", found
        self._history.append(self._amax)
        self._iteration, self._amax, self._open = None, 0.0, {}

    def _judge(self, found: DelayedScaling, limit: float) -> None:
        if self._amax > limit:
            found.overflowed = 1
            found.most_excess.value = math.log2(self._amax) - math.log2(limit)
        elif self._amax:
            found.wasted = 1
            found.most_waste.value = math.log2(limit) - math.log2(self._amax)
            found.waste.add(found.most_waste.value)

    def _limit(self, window: int, margin: int) -> float:
        """Return the largest magnitude under the scale, 0 without a history."""
        return max(list(self._history)[-window:], default=0.0) * 2.0**margin
