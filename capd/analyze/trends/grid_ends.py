"""The two ends of a format's grid: the last bucket, which holds the largest values, and the dead zone about 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from capd.analyze.format_choice import FormatChoice
from capd.analyze.grids import Grid, grid_of
from capd.analyze.trends.sums import Number, Problems, TrendSums, share_of_all
from capd_client.formats.spec import FormatError

if TYPE_CHECKING:
    import torch

    from capd_client.formats.encoding import QuantisedPiece

__all__ = ["DeadZone", "GridEnds", "LastBucket", "grid_ends"]

# Below the largest value, and above the next one of every grid.
_ALMOST = 1 - 2.0**-13


@dataclass(slots=True)
class GridEnds(TrendSums):
    """Counts of values by their place on a format's grid. NaN and Inf count in no share.

    Attributes:
        count: All values.
        finite: The values that are neither NaN nor Inf.
        zero: The values that are 0 before.
        dead: The values with 0 < |x| < half of the smallest value of the grid under their scale.
        last: The values that become the largest magnitude of the grid under their scale.
        beyond: The values with |x| above this magnitude.
        blocks: The blocks with a finite value other than 0.
        full: Those of them whose values other than 0 are all in the last bucket.
    """

    count: int = 0
    finite: int = 0
    zero: int = 0
    dead: int = 0
    last: int = 0
    beyond: int = 0
    blocks: int = 0
    full: int = 0


@dataclass(slots=True)
class LastBucket(GridEnds):
    """The share of values in the last bucket, those that become ± the largest value of the grid.

    Source: "Characterization and Mitigation of Training Instabilities in Microscaling Formats", arXiv 2506.20752:
    affine weights of layer norms lie so close together that all values of a block fall into the last bucket.
    """

    def numbers(self) -> dict[str, Number]:
        """Return the shares of `last` and `beyond` in the finite values, and of `full` in the blocks."""
        return {
            "values": self.count,
            "last_percent": share_of_all(self.last, self.finite),
            "beyond_percent": share_of_all(self.beyond, self.finite),
            "blocks": self.blocks,
            "full_blocks_percent": share_of_all(self.full, self.blocks),
        }


@dataclass(slots=True)
class DeadZone(GridEnds):
    """The share of values that rounding to nearest takes to 0: |x| < half the smallest step under its scale.

    A tie at the edge does not count. Source: the underflow of TransformerEngine's debug statistics
    (`debug/features/utils/stats_computation.py`, `underflows%`), by the edge and not by the result.
    """

    def numbers(self) -> dict[str, Number]:
        """Return the shares of `dead` in the finite values and in those other than 0, and of `zero`."""
        return {
            "values": self.count,
            "dead_percent": share_of_all(self.dead, self.finite),
            "dead_of_nonzero_percent": share_of_all(self.dead, self.finite - self.zero),
            "zero_percent": share_of_all(self.zero, self.finite),
        }


Ends = TypeVar("Ends", bound=GridEnds)


def grid_ends(
    values: torch.Tensor, choices: Sequence[FormatChoice], kind: type[Ends]
) -> tuple[dict[str, Ends], Problems]:
    """Return the counts of one tensor in each format, by the format's label, and why others have none."""
    import torch

    from capd_client.formats.encoding import quantised_pieces

    found: dict[str, Ends] = {}
    problems = []
    for choice in choices:
        spec, ends = choice.spec, kind()
        try:
            for piece in quantised_pieces(values, spec, torch.Generator().manual_seed(0)):
                _add(ends, piece, grid_of(spec.fmt, spec.elem), has_blocks=spec.block is not None)
        except FormatError as error:
            problems.append(f"{choice.label}: {error}")
            continue
        found[choice.label] = ends
    return found, problems


def _add(ends: GridEnds, piece: QuantisedPiece, grid: Grid, *, has_blocks: bool) -> None:
    x = np.abs(piece.values.numpy().astype(np.float64))
    y = np.abs(piece.found.numpy().astype(np.float64))
    unit = np.float64(1) if piece.after is None else piece.after.numpy().astype(np.float64)
    within = np.True_ if piece.within is None else piece.within.numpy()
    # The neighbours of a NaN in a block lose their scale, and are left out.
    usable: NDArray[np.bool_] = np.isfinite(x) & np.isfinite(unit) & within
    some = usable & (x > 0)
    last = some & (unit > 0) & (y >= unit * grid.largest * _ALMOST)
    ends.count += int(np.broadcast_to(within, x.shape).sum())
    ends.finite += int(usable.sum())
    ends.zero += int((usable & (x == 0)).sum())
    ends.dead += int((some & (x < unit * grid.smallest / 2)).sum())
    ends.last += int(last.sum())
    # An exact scale is rounded to float32, which puts no value beyond it.
    ends.beyond += int((some & (unit > 0) & (x > unit * grid.largest * (1 + 2.0**-21))).sum())
    if has_blocks:
        filled = some.any(-1)
        ends.blocks += int(filled.sum())
        ends.full += int((filled & (last == some).all(-1)).sum())
