"""The error of a replayed product: sums over its values, which merge exactly.

G is the product of the captured operands, Ĝ that of the quantised ones, and d = Ĝ - G. Values that are not finite in G
are counted and left out of every sum. So are values that are finite in G alone, which are counted as `lost`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from capd.analyze.error_sums import decibels
from capd.analyze.exact import quotient

__all__ = ["BLAMED", "BlameSums", "CapturedDistance", "DrawSums", "ProductSums", "WorstRow"]

BLAMED = ("a", "b", "cross", "mask")
"""The parts of an error: (q(A) - A) B, A (q(B) - B), (q(A) - A) (q(B) - B), and what a mask takes away."""


class WorstRow(NamedTuple):
    """The row of a product with the lowest SQNR.

    Attributes:
        call: The name of the call in messages.
        row: The number of the row in the product: a token of Y and dX, an output feature of dW.
        sqnr_db: Its SQNR.
    """

    call: str
    row: int
    sqnr_db: float


@dataclass(slots=True)
class BlameSums:
    """The parts of an error by operand, in the whole units of `capd.analyze.exact`.

    Attributes:
        energy: Σ of the squares of each part, in the order of `BLAMED`.
        inner: Σ of each part times the error d. Together they are Σd².
        noise: Σd².
    """

    energy: list[int] = field(default_factory=lambda: [0] * len(BLAMED))
    inner: list[int] = field(default_factory=lambda: [0] * len(BLAMED))
    noise: int = 0

    def add(self, other: BlameSums) -> None:
        """Add the sums of other calls."""
        for mine, theirs in ((self.energy, other.energy), (self.inner, other.inner)):
            for at, value in enumerate(theirs):
                mine[at] += value
        self.noise += other.noise

    def shares(self) -> dict[str, dict[str, float | None]]:
        """Return the shares of each part: `energy` = Σe_i² / Σd², and `inner` = Σe_i d / Σd².

        The inner shares add up to 1. The energies do so only if the parts are orthogonal.
        """
        return {
            name: {"energy": quotient(energy, self.noise), "inner": quotient(inner, self.noise)}
            for name, energy, inner in zip(BLAMED, self.energy, self.inner, strict=True)
        }


@dataclass(slots=True)
class DrawSums:
    """The error of the mean of several draws, and of the draws themselves. Each sum is over all draws.

    Attributes:
        draws: The draws of each call.
        signal: Σ G².
        noise: Σ of the squares of (mean of Ĝ over the draws) - G.
        each: Σ d².
    """

    draws: int = 0
    signal: int = 0
    noise: int = 0
    each: int = 0

    def add(self, other: DrawSums) -> None:
        """Add the sums of other calls with as many draws."""
        self.draws = max(self.draws, other.draws)
        self.signal += other.signal
        self.noise += other.noise
        self.each += other.each

    @property
    def sqnr_db(self) -> float | None:
        """The SQNR of the mean of the draws."""
        return decibels(self.signal, self.noise)

    @property
    def gain_db(self) -> float | None:
        """What the mean gains over one draw. An unbiased product gains `ideal_db`, a bias takes from it."""
        return decibels(self.each, self.noise)

    @property
    def ideal_db(self) -> float:
        """10 * log10(draws): the gain where the errors of the draws are independent and have no mean."""
        return 10 * math.log10(self.draws) if self.draws else 0.0


@dataclass(slots=True)
class CapturedDistance:
    """The distance of captured products from those that the recipe of their job gives, in the captured dtype.

    Attributes:
        calls: The compared products.
        values: Their values.
        equal: The values that agree in every bit.
        max_ulp: The largest distance in units in the last place: the number of steps of the dtype between two values.
        nonfinite: The values that disagree and are not finite on a side.
        biased: The products that are not compared, because they add a bias and biases are not captured.
    """

    calls: int = 0
    values: int = 0
    equal: int = 0
    max_ulp: int = 0
    nonfinite: int = 0
    biased: int = 0

    def add(self, other: CapturedDistance) -> None:
        """Add other products."""
        self.calls += other.calls
        self.values += other.values
        self.equal += other.equal
        self.max_ulp = max(self.max_ulp, other.max_ulp)
        self.nonfinite += other.nonfinite
        self.biased += other.biased


@dataclass(slots=True)
class ProductSums:
    """The error of one product in one recipe, over any number of calls. `add` is associative and commutative.

    Attributes:
        calls: The calls.
        values: The values of their products, of all draws.
        nonfinite: The values that are NaN or Inf in G.
        lost: The values that are finite in G and not in Ĝ.
        signal: Σ G², in the whole units of `capd.analyze.exact`.
        cross: Σ G d.
        noise: Σ d².
        worst: The worst row, None if no row with a signal has an error.
        blame: The parts of the error, if they are wanted.
        draws: The mean of the draws, for a random product of which several are drawn.
        is_random: Whether some operand was rounded at random.
        references: The dtypes in which G was computed.
        captured: The distance of the captured products, if this is the recipe of their job.
    """

    calls: int = 0
    values: int = 0
    nonfinite: int = 0
    lost: int = 0
    signal: int = 0
    cross: int = 0
    noise: int = 0
    worst: WorstRow | None = None
    blame: BlameSums | None = None
    draws: DrawSums | None = None
    is_random: bool = False
    references: set[str] = field(default_factory=set)
    captured: CapturedDistance | None = None

    def add(self, other: ProductSums) -> None:
        """Add the sums of other calls in the same recipe."""
        self.calls += other.calls
        self.values += other.values
        self.nonfinite += other.nonfinite
        self.lost += other.lost
        self.signal += other.signal
        self.cross += other.cross
        self.noise += other.noise
        self.is_random |= other.is_random
        self.references |= other.references
        self.worst = _worse(self.worst, other.worst)
        if other.blame is not None:
            self.blame = BlameSums() if self.blame is None else self.blame
            self.blame.add(other.blame)
        if other.draws is not None:
            self.draws = DrawSums() if self.draws is None else self.draws
            self.draws.add(other.draws)
        if other.captured is not None:
            self.captured = CapturedDistance() if self.captured is None else self.captured
            self.captured.add(other.captured)

    @property
    def sqnr_db(self) -> float | None:
        """10 * log10(ΣG² / Σd²), over all draws. Inf without an error, None without a signal and an error."""
        return decibels(self.signal, self.noise)

    @property
    def zeta(self) -> float | None:
        """ζ = ‖Ĝ - G‖ / ‖G‖ (arXiv 2506.20752, the relative bias of gradients). None without a signal."""
        share = quotient(self.noise, self.signal)
        return None if share is None else math.sqrt(share)

    @property
    def alignment(self) -> float | None:
        """⟨Ĝ, G⟩ / ‖G‖²: the magnitude along G. 1 where it is unbiased (arXiv 2505.14669, section 4)."""
        return quotient(self.signal + self.cross, self.signal)

    @property
    def cosine(self) -> float | None:
        """⟨Ĝ, G⟩ / (‖Ĝ‖ ‖G‖)."""
        found = self.signal + 2 * self.cross + self.noise
        return quotient(self.signal + self.cross, math.isqrt(max(0, self.signal * found)))


def _worse(a: WorstRow | None, b: WorstRow | None) -> WorstRow | None:
    if a is None or b is None:
        return b if a is None else a
    # Among equals the order of the calls must not decide.
    return min(a, b, key=lambda one: (one.sqnr_db, one.call, one.row))
