"""The effect of a Hadamard transform on a tensor: the format's error, the kurtosis and the range of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from capd.analyze.error_sums import Errors
from capd.analyze.exact import ShortSum
from capd.analyze.format_choice import FormatChoice
from capd.analyze.trends.moments import PowerSums, power_sums
from capd.analyze.trends.sums import Number, Problems, TrendSums, mean_of
from capd_client.formats.spec import FormatError, Spec

if TYPE_CHECKING:
    import torch

__all__ = ["BlockCrests", "HadamardEffect", "block_crests", "hadamard_effects"]

# The length of the blocks of a format without blocks.
_BLOCK = 32


@dataclass(slots=True)
class BlockCrests(TrendSums):
    """How far the largest magnitude of a block is above the others: its range, and max|x| / RMS, in powers of two.

    Attributes:
        blocks: The blocks with a finite value other than 0.
        ranges: Σ log2(max|x| / min|x|) over them, of the values other than 0.
        crests: Σ log2(max|x| / √mean x²).
    """

    blocks: int = 0
    ranges: ShortSum = field(default_factory=ShortSum)
    crests: ShortSum = field(default_factory=ShortSum)

    def numbers(self) -> dict[str, Number]:
        """Return the means over the blocks."""
        return {"range": mean_of(self.ranges, self.blocks), "crest": mean_of(self.crests, self.blocks)}


@dataclass(slots=True)
class HadamardEffect(TrendSums):
    """The numbers of tensors before and after x → x (I ⊗ diag(s) H).

    H is an orthonormal Hadamard matrix, and s are random signs.
    H keeps Σx², and Σd² of the error made after it. So the SQNR of the transformed tensor is that of the tensor which
    is transformed, quantised and transformed back.

    Source: "Training LLMs with MXFP4", arXiv 2502.20586 (variance by outliers, with and without the random Hadamard
    transform); "Pretraining Large Language Models with NVFP4", arXiv 2509.25149 (sizes of the transform).

    Attributes:
        records: The tensors.
        before, after: The errors of the format.
        moments_before, moments_after: The moments of the values.
        crests_before, crests_after: The ranges within blocks.
    """

    records: int = 0
    before: Errors = field(default_factory=Errors)
    after: Errors = field(default_factory=Errors)
    moments_before: PowerSums = field(default_factory=PowerSums)
    moments_after: PowerSums = field(default_factory=PowerSums)
    crests_before: BlockCrests = field(default_factory=BlockCrests)
    crests_after: BlockCrests = field(default_factory=BlockCrests)

    def numbers(self) -> dict[str, Number]:
        """Return SQNR, kurtosis, and the mean range and crest of blocks, before and after."""
        before, after = self.crests_before.numbers(), self.crests_after.numbers()
        return {
            "values": self.before.count,
            "sqnr_db_before": self.before.sqnr_db,
            "sqnr_db_after": self.after.sqnr_db,
            "gain_db": _difference(self.before.sqnr_db, self.after.sqnr_db),
            "kurtosis_before": self.moments_before.kurtosis,
            "kurtosis_after": self.moments_after.kurtosis,
            "block_range_before": before["range"],
            "block_range_after": after["range"],
            "block_crest_before": before["crest"],
            "block_crest_after": after["crest"],
        }


def hadamard_effects(
    values: torch.Tensor, choices: Sequence[FormatChoice], sizes: Sequence[int]
) -> tuple[dict[str, HadamardEffect], Problems]:
    """Return the effect on one tensor by the labels of format and size ("mxfp4 H16"), and why others have none.

    The transform runs along the axis of the format's blocks, the last one without blocks. It has random signs of a
    fixed seed, the same for all tensors.
    """
    import torch

    from capd.analyze.measure import errors_of
    from capd_client.formats.transforms.hadamard import hadamard, seeded_signs

    x = values.detach().to(torch.float32)
    if not bool(torch.isfinite(x).all()):
        return {}, ["a transform spreads its NaN or Inf over a whole block"]
    found: dict[str, HadamardEffect] = {}
    problems: Problems = []
    before: list[tuple[FormatChoice, Errors, BlockCrests]] = []
    for choice in choices:
        try:
            before.append((choice, errors_of(values, choice), block_crests(x, choice.spec)))
        except FormatError as error:
            problems.append(f"{choice.label}: {error}")
    plain = power_sums(x)
    for size in sizes:
        turned: dict[int, tuple[torch.Tensor, PowerSums]] = {}
        for choice, errors, crests in before:
            axis = -1 if choice.axis is None else choice.axis
            try:
                if axis not in turned:
                    after = hadamard(x, size, axis=axis, signs=seeded_signs(size, 0))
                    turned[axis] = after, power_sums(after)
                after, moments = turned[axis]
                found[f"{choice.label} H{size}"] = one = HadamardEffect()
                # Adding copies the sums that several sizes share.
                one.add(
                    HadamardEffect(
                        1,
                        errors,
                        errors_of(after, choice),
                        plain,
                        moments,
                        crests,
                        block_crests(after, choice.spec),
                    )
                )
            except FormatError as error:
                problems.append(f"{choice.label}: {error}")
    return found, problems


def block_crests(x: torch.Tensor, spec: Spec) -> BlockCrests:
    """Return the ranges within the format's blocks, of 32 values along the last axis for one without blocks.

    Args:
        x: float32, without NaN and Inf.
        spec: The format.

    Raises:
        FormatError: If x lacks the axis.
    """
    import torch

    from capd_client.formats.blocks import Layout, pieces
    from capd_client.formats.encoding import layout_of

    found = BlockCrests()
    layout = Layout(x.shape, -1, _BLOCK) if spec.block is None else layout_of(x, spec)
    if not x.numel():
        return found
    rows = layout.rows(x)
    # The fill of an incomplete block counts in no mean.
    sizes = layout.rows(torch.ones_like(x, dtype=torch.bool)).sum(-1) if layout.has_fill else None
    for piece in pieces(rows):
        magnitude = np.abs(rows[piece].numpy().astype(np.float64))
        some = magnitude.any(-1)
        often = rows.shape[-1] if sizes is None else sizes[piece].numpy()[some]
        magnitude = magnitude[some]
        largest = magnitude.max(-1, initial=0.0)
        smallest = np.where(magnitude > 0, magnitude, np.inf).min(-1, initial=np.inf)
        scaled = magnitude / largest[:, None]
        found.blocks += len(magnitude)
        found.ranges.add(float((np.log2(largest) - np.log2(smallest)).sum()))
        found.crests.add(float((-np.log2((scaled**2).sum(-1) / often) / 2).sum()))
    return found


def _difference(before: float | None, after: float | None) -> float | None:
    """Return after - before, None without both or between infinities."""
    if before is None or after is None or before == after:
        return None if before is None or after is None else 0.0
    return after - before
