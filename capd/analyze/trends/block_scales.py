"""The distribution of the scales that a format stores for its blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from capd.analyze.blocks import histogram_of
from capd.analyze.exact import ShortSum
from capd.analyze.format_choice import FormatChoice
from capd.analyze.trends.sums import Floats, Number, Problems, TrendSums, share_of_all
from capd.store.format.dtypes import value_table
from capd_client.formats.spec import FORMATS, FormatError, Spec

if TYPE_CHECKING:
    import torch

__all__ = ["SCALE_ENDS", "BlockScaleCounts", "block_scale_counts"]

SCALE_ENDS = {"e8m0": (0, 254, 0), "e4m3": (1, 126, 7), "float32": None}
"""The smallest and the largest stored scale above 0, and the largest subnormal one. float32 has no such ends here."""
_BIAS = 127


@dataclass(slots=True)
class BlockScaleCounts(TrendSums):
    """The stored scales of blocks: how often each occurs, and how they vary along a row of blocks.

    entropy = -Σ p log2 p of the stored scales, in bits. The deviation within a row is that of log2(scale) of the blocks
    of one row about the row's own mean: √(Σ_rows Σ_blocks (l - mean of the row)² / blocks). A row is a line of blocks
    along the axis that the blocks run along. Blocks of zeros alone and blocks with NaN or Inf are left out.

    Source: OCP Microscaling Formats v1.0, section 5.4.1 (E8M0); "Pretraining Large Language Models with NVFP4", arXiv
    2509.25149 (E4M3 scales); "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027 (the choice of scales).

    Attributes:
        blocks: All blocks.
        empty: The blocks of zeros alone.
        invalid: The blocks with a NaN or an Inf.
        zero: The other blocks whose scale rounded to 0.
        lowest, highest, subnormal: The blocks whose scale is the smallest above 0, the largest, and a subnormal.
        ended: The blocks with a kind of scale that has such ends.
        scales: The count of each stored byte; of float32 scales of each floor(log2).
        exponents: The count of each floor(log2(scale)).
        squares: The sum over rows of the squared deviations of log2(scale) from the row's mean.
        logs: Σ log2(scale).
        of_logs: Σ log2(scale)².
        logged: The blocks that these three sums cover.
    """

    blocks: int = 0
    empty: int = 0
    invalid: int = 0
    zero: int = 0
    lowest: int = 0
    highest: int = 0
    subnormal: int = 0
    ended: int = 0
    scales: Counter[int] = field(default_factory=Counter)
    exponents: Counter[int] = field(default_factory=Counter)
    squares: ShortSum = field(default_factory=ShortSum)
    logs: ShortSum = field(default_factory=ShortSum)
    of_logs: ShortSum = field(default_factory=ShortSum)
    logged: int = 0

    @property
    def entropy(self) -> float | None:
        """The entropy of the stored scales in bits, None without any."""
        total = sum(self.scales.values())
        shares = [count / total for _, count in sorted(self.scales.items()) if count]
        return -math.fsum(share * math.log2(share) for share in shares) + 0.0 if shares else None

    @property
    def row_std(self) -> float | None:
        """The standard deviation of log2(scale) within rows, None without any."""
        return math.sqrt(self.squares.value / self.logged) if self.logged else None

    @property
    def std(self) -> float | None:
        """The standard deviation of log2(scale) over all blocks, None without any."""
        if not self.logged:
            return None
        mean = self.logs.value / self.logged
        return math.sqrt(max(0.0, self.of_logs.value / self.logged - mean**2))

    def numbers(self) -> dict[str, Number]:
        """Return shares of all blocks, those of ends of the blocks with such ends, entropy and deviations."""
        return {
            "blocks": self.blocks,
            "distinct": len(self.scales),
            "entropy_bits": self.entropy,
            "log2_mean": self.logs.value / self.logged if self.logged else None,
            "log2_std": self.std,
            "row_log2_std": self.row_std,
            "lowest_percent": share_of_all(self.lowest, self.ended),
            "highest_percent": share_of_all(self.highest, self.ended),
            "subnormal_percent": share_of_all(self.subnormal, self.ended),
            "zero_percent": share_of_all(self.zero, self.blocks),
            "empty_percent": share_of_all(self.empty, self.blocks),
            "invalid_percent": share_of_all(self.invalid, self.blocks),
        }

    def details(self) -> dict[str, dict[str, int]]:
        """Return the count of each stored scale (a byte, or floor(log2) of float32 scales), and of floor(log2)."""
        return {
            name: {str(code): count for code, count in sorted(counts.items())}
            for name, counts in (("scales", self.scales), ("exponents", self.exponents))
        }


def block_scale_counts(
    values: torch.Tensor, choices: Sequence[FormatChoice]
) -> tuple[dict[str, BlockScaleCounts], Problems]:
    """Return the scales of one tensor in each format, by the format's label, and why others have none."""
    found, problems = {}, []
    for choice in choices:
        spec = choice.spec
        if spec.block is None or FORMATS[spec.fmt].scale_type not in SCALE_ENDS:
            problems.append(f"{choice.label}: its blocks have no stored scale that could be counted")
            continue
        try:
            found[choice.label] = _counts(values, spec)
        except FormatError as error:
            problems.append(f"{choice.label}: {error}")
    return found, problems


def _counts(values: torch.Tensor, spec: Spec) -> BlockScaleCounts:
    import torch

    from capd_client.formats.encoding import encoded_as, layout_of

    x = values.detach().to(torch.float32)
    layout = layout_of(x, spec)
    if not x.numel():
        return BlockScaleCounts()
    stored = encoded_as(x, spec, torch.Generator().manual_seed(0)).scale
    if stored is None:
        raise FormatError("its blocks have no stored scale")
    amax = layout.join_scales(layout.rows(x).abs().amax(-1, keepdim=True))
    rows, largest = (_in_rows(one, spec.axis) for one in (stored, amax))
    return _counted(rows, largest, FORMATS[spec.fmt].scale_type)


def _in_rows(scales: torch.Tensor, axis: int) -> NDArray[np.generic]:
    """Return scales as [rows, blocks of a row]."""
    if scales.ndim < 2:
        return scales.reshape(1, -1).numpy()
    moved = scales.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1]).numpy()


def _counted(stored: NDArray[np.generic], amax: NDArray[np.generic], kind: str) -> BlockScaleCounts:
    empty, invalid = amax == 0, ~np.isfinite(amax)
    usable = ~(empty | invalid)
    found = BlockScaleCounts(stored.size, int(empty.sum()), int(invalid.sum()))
    logs = _logs(stored, kind)
    is_zero = usable & np.isneginf(logs)
    found.zero = int(is_zero.sum())
    codes = stored[usable & (~is_zero if kind == "float32" else True)]
    found.scales.update(histogram_of(np.floor(np.log2(codes)) if kind == "float32" else codes))
    ends = SCALE_ENDS[kind]
    if ends is not None:
        lowest, highest, subnormal = ends
        found.ended = codes.size
        found.lowest = int((codes == lowest).sum())
        found.highest = int((codes == highest).sum())
        # Of E8M0 no scale is subnormal: byte 0 is 2^-127.
        found.subnormal = int(((codes >= lowest) & (codes <= subnormal)).sum()) if subnormal else 0
    _add_rows(found, np.where(usable & ~is_zero, logs, np.nan))
    return found


def _logs(stored: NDArray[np.generic], kind: str) -> Floats:
    """Return log2 of scales, -Inf for 0."""
    if kind == "e8m0":
        return stored.astype(np.float64) - _BIAS
    scales = value_table("float8_e4m3fn")[stored] if kind == "e4m3" else stored
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = np.log2(scales.astype(np.float64))
    return found


def _add_rows(found: BlockScaleCounts, logs: Floats) -> None:
    is_there = np.isfinite(logs)
    count = is_there.sum(-1)
    rows = np.where(is_there, logs, 0.0)[count > 0]
    there, often = is_there[count > 0], count[count > 0]
    mean = rows.sum(-1) / often
    found.logged = int(often.sum())
    found.exponents.update(histogram_of(np.floor(logs[is_there])))
    found.logs.add(float(rows.sum()))
    found.of_logs.add(float((rows * rows).sum()))
    found.squares.add(float((np.where(there, rows - mean[:, None], 0.0) ** 2).sum()))
