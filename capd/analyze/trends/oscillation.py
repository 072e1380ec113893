"""Oscillation of quantised weights: codes that change from step to step, and how near weights are to an edge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from capd.analyze.exact import ShortSum
from capd.analyze.format_choice import FormatChoice
from capd.analyze.grids import Grid, grid_of
from capd.analyze.trends.sums import Number, Problems, TrendSums, mean_of, share_of_all
from capd_client.formats.spec import FormatError, Spec

if TYPE_CHECKING:
    import torch

__all__ = ["CodeSnapshot", "Codes", "Flips", "Oscillation", "code_snapshot", "edge_distances"]

# An edge is near below this share of a step, a tenth of the largest distance.
_NEAR = 0.05
_PIECE = 1 << 17
Signs = NDArray[np.int8]
Floats32 = NDArray[np.float32]


@dataclass(slots=True)
class Oscillation(TrendSums):
    """Changes of codes between two captured steps of a weight, and distances to the nearest rounding edge.

    With w the weight and q(w) its value in the format, summed over weights and pairs of steps:
    changed = share of weights whose code differs. ratio = Σ|Δq(w)| / Σ|Δw|. flips = changed weights / Σ|Δw|.
    reversed = share of weights, in the pairs from the second on, whose code changed and whose q(w) moved in the
    opposite direction of its last such move. distance = mean of | |w| / scale - edge | / step, where the step is that
    between the two grid values around the weight, and the edge is in their middle: 0 at an edge, 0.5 on the grid, 0.25
    for even spreads.

    Source: TetraJet, arXiv 2502.20853, and TetraJet-v2, arXiv 2510.27527 (oscillation of weights between two values of
    the grid, against the way that the weights themselves go; confidence by the distance to an edge); Nagel et al.,
    "Overcoming Oscillations in Quantization-Aware Training", arXiv 2203.11086 (a move against the last one).

    Attributes:
        pairs: The compared pairs of steps of a series.
        weights: The weights in them that are finite at both steps.
        changed: Those of them whose code differs.
        scales, scales_changed: The scales in the pairs, and those that differ.
        followed: The weights in pairs that have a pair before.
        reversed: Those of them that moved back.
        moved, moved_code: Σ|Δw|, Σ|Δq(w)|.
        placed: The weights with a distance, over all steps: finite, and within the format's range.
        near: Those of them that are nearer to an edge than 0.05 steps.
        distance: Σ of the distances.
    """

    pairs: int = 0
    weights: int = 0
    changed: int = 0
    scales: int = 0
    scales_changed: int = 0
    followed: int = 0
    reversed: int = 0
    moved: ShortSum = field(default_factory=ShortSum)
    moved_code: ShortSum = field(default_factory=ShortSum)
    placed: int = 0
    near: int = 0
    distance: ShortSum = field(default_factory=ShortSum)

    def numbers(self) -> dict[str, Number]:
        """Return the shares in percent, the two quotients by Σ|Δw|, and the mean distance in steps."""
        moved = self.moved.value
        return {
            "pairs": self.pairs,
            "weights": self.weights,
            "changed_percent": share_of_all(self.changed, self.weights),
            "ratio": self.moved_code.value / moved if moved else None,
            "flips_per_move": self.changed / moved if moved else None,
            "reversed_percent": share_of_all(self.reversed, self.followed),
            "scales_changed_percent": share_of_all(self.scales_changed, self.scales),
            "edge_distance": mean_of(self.distance, self.placed),
            "near_edge_percent": share_of_all(self.near, self.placed),
        }


@dataclass(frozen=True, slots=True)
class Codes:
    """A tensor in one format.

    Attributes:
        codes: One code for each value; zero has one code, whatever its sign.
        scales: The stored scales, None without any.
        found: The values that the codes represent, float32.
        placed, near, distance: As in `Oscillation`, of this tensor alone.
    """

    codes: NDArray[np.generic]
    scales: NDArray[np.generic] | None
    found: Floats32
    placed: int
    near: int
    distance: float


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """A tensor at one step: its values, float32, and its codes by the format's label."""

    values: Floats32
    formats: dict[str, Codes]


def code_snapshot(
    values: torch.Tensor, choices: Sequence[FormatChoice]
) -> tuple[CodeSnapshot | None, Problems]:
    """Return the codes of a tensor in each format, and why it has none in others."""
    import torch

    x = values.detach().to(torch.float32)
    found, problems = {}, []
    for choice in choices:
        try:
            found[choice.label] = _codes(x, choice.spec)
        except FormatError as error:
            problems.append(f"{choice.label}: {error}")
    return (CodeSnapshot(x.numpy().reshape(-1), found) if found else None), problems


def _codes(x: torch.Tensor, spec: Spec) -> Codes:
    import torch

    from capd_client.formats.encoding import decoded, encoded_as, quantised_pieces

    grid = grid_of(spec.fmt, spec.elem)
    encoded = encoded_as(x, spec, torch.Generator().manual_seed(0))
    placed, near, total = 0, 0, ShortSum()
    for piece in quantised_pieces(x, spec, torch.Generator().manual_seed(0)):
        magnitude = np.abs(piece.values.numpy().astype(np.float64))
        unit = np.float64(1) if piece.after is None else piece.after.numpy().astype(np.float64)
        usable: NDArray[np.bool_] = np.isfinite(magnitude) & (unit > 0)
        if piece.within is not None:
            usable &= piece.within.numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = (magnitude / unit)[usable]
        distances = edge_distances(scaled[scaled <= grid.largest], grid)
        placed += distances.size
        near += int((distances < _NEAR).sum())
        total.add(float(distances.sum()))
    found = decoded(encoded).numpy().reshape(-1)
    codes = encoded.payload.numpy().reshape(-1)
    codes[found == 0] = 0
    scales = None if encoded.scale is None else encoded.scale.numpy().reshape(-1)
    return Codes(codes, scales, found, placed, near, total.value)


def edge_distances(scaled: NDArray[np.float64], grid: Grid) -> NDArray[np.float64]:
    """Return the distance of magnitudes to the middle of the two grid values around them, in steps: 0 to 0.5.

    Args:
        scaled: |x| / scale, within the grid's range, float64 of any shape.
        grid: The grid.
    """
    low, high = min(grid.mantissa_bits), max(grid.mantissa_bits)
    bits = np.array([grid.mantissa_bits[exponent] for exponent in range(low, high + 1)])
    exponent = np.clip(np.frexp(scaled)[1] - 1, low, high)
    steps = scaled / np.exp2(np.where(scaled < grid.smallest, low, exponent) - bits[exponent - low])
    distances: NDArray[np.float64] = np.abs(steps - np.floor(steps) - 0.5)
    return distances


class Flips:
    """The changes of one series' codes, step by step. Holds the last step and a sign for each weight.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._iteration: int | None = None
        self._last: CodeSnapshot | None = None
        self._signs: dict[str, Signs] = {}

    def add(self, iteration: int, now: CodeSnapshot) -> Iterator[tuple[int, str, Oscillation]]:
        """Add a record. Yields the changes since the last step in each format, under the iteration of this record.

        Of several records of one step, the first one counts.
        """
        last = self._last
        if last is not None and self._iteration == iteration:
            return
        if last is not None and last.values.size != now.values.size:
            last, self._signs = None, {}
        for label, codes in now.formats.items():
            found = Oscillation(placed=codes.placed, near=codes.near)
            found.distance.add(codes.distance)
            if last is not None and label in last.formats:
                self._add_changes(found, label, last, now)
            yield iteration, label, found
        self._iteration, self._last = iteration, now

    def close(self) -> Iterator[tuple[int, str, Oscillation]]:
        """Yield nothing: every step was yielded when it came."""
        return iter(())

    def _add_changes(self, found: Oscillation, label: str, last: CodeSnapshot, now: CodeSnapshot) -> None:
        before, after = last.formats[label], now.formats[label]
        found.pairs = 1
        if before.scales is not None and after.scales is not None:
            found.scales = after.scales.size
            found.scales_changed = int((before.scales != after.scales).sum())
        has_earlier = label in self._signs
        signs = self._signs.setdefault(label, np.zeros(now.values.size, np.int8))
        for start in range(0, now.values.size, _PIECE):
            part = slice(start, start + _PIECE)
            # float32 values of both signs may be further apart than its largest number.
            x, y = (of[part].astype(np.float64) for of in (last.values, before.found))
            # Inf - Inf is no move, and left out.
            with np.errstate(invalid="ignore"):
                moved, turned = now.values[part] - x, after.found[part] - y
            usable = np.isfinite(moved) & np.isfinite(turned)
            # A scale that changes moves q(w) of every weight of its block a little, which is no flip.
            is_flip = usable & (before.codes[part] != after.codes[part])
            way = np.where(is_flip, np.sign(turned), 0).astype(np.int8)
            found.weights += int(usable.sum())
            found.changed += int(is_flip.sum())
            found.reversed += int((way * signs[part] < 0).sum())
            found.moved.add(float(np.abs(moved[usable]).sum()))
            found.moved_code.add(float(np.abs(turned[usable]).sum()))
            # A weight that stood still keeps the direction of its last move.
            signs[part] = np.where(way == 0, signs[part], way)
        found.followed = found.weights if has_earlier else 0
