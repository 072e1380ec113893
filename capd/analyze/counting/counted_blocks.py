"""The quantised values of a 16-bit tensor in formats with blocks, each with its count.

A tensor has few scales and few bit patterns, and a pair of both always has the same result. One pass over the tensor
counts the pairs. The formats then quantise each pair once. Formats with the same blocks share the pass; formats that
also give the same blocks equal scales share the counts. Rounding is symmetric, so signs are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from capd.analyze.counting.pair_counts import MAGNITUDES, PairBins, count_pairs
from capd.analyze.counting.scale_classes import ScaleClasses, Whole, values_of
from capd.analyze.distribution import Distribution
from capd_client.formats.blocks import Layout
from capd_client.formats.encoding import QuantisedPiece, layout_of
from capd_client.formats.scaled import BlockScales, on_scales
from capd_client.formats.spec import FormatError, Spec

__all__ = ["CountedBlocks", "counted_blocks"]

# A pair costs as much as a few values, so tensors with fewer values, or fewer for each bin, are not counted.
FEWEST_VALUES = 1 << 17
VALUES_PER_BIN = 1
_DTYPES = (torch.bfloat16, torch.float16)


class CountedBlocks(NamedTuple):
    """The values and the blocks of one tensor in one format.

    Attributes:
        values: The magnitudes before and after, and the multiplier of each in `after`.
        counts: int64 [values], how many elements of the tensor each stands for. Fill is left out.
        blocks: The largest magnitudes of blocks in `amax`, their multipliers and stored scales.
        block_counts: int64 [blocks], how many blocks each stands for.
    """

    values: QuantisedPiece
    counts: Whole
    blocks: QuantisedPiece
    block_counts: Whole


def counted_blocks(
    values: torch.Tensor, distribution: Distribution, specs: Sequence[Spec]
) -> dict[Spec, CountedBlocks]:
    """Count the blocks of a tensor for those formats for which counting is possible and fast.

    Left out are small tensors, formats without blocks, legacy, random rounding and special scales.

    Args:
        values: A tensor of any dtype and shape. Only 16-bit dtypes are counted.
        distribution: The distribution of the same values.
        specs: The formats.
    """
    if values.dtype not in _DTYPES or values.numel() < FEWEST_VALUES:
        return {}
    occurring = _magnitude_counts(distribution)
    patterns = np.flatnonzero(occurring)
    by_layout: dict[Layout, dict[Spec, ScaleClasses]] = defaultdict(dict)
    for spec in specs:
        layout = _layout(values, spec)
        if layout is not None:
            by_layout[layout][spec] = ScaleClasses.of(patterns, values.dtype, spec)
    found: dict[Spec, CountedBlocks] = {}
    for layout, classes in by_layout.items():
        found |= _counted(values, layout, classes, occurring)
    return found


def _layout(values: torch.Tensor, spec: Spec) -> Layout | None:
    """Return the blocks of a format, None if it cannot be counted or does not take the tensor."""
    if spec.block is None or spec.legacy or spec.is_random or spec.is_special:
        return None
    try:
        return layout_of(values, spec)
    except FormatError:
        return None


def _magnitude_counts(distribution: Distribution) -> Whole:
    """Return the count of each pattern of a magnitude, int64 [32768]."""
    found = np.zeros(MAGNITUDES, np.int64)
    for _, codes, counts in distribution.magnitudes():
        found[codes] = counts
    return found


def _counted(
    values: torch.Tensor, layout: Layout, classes: Mapping[Spec, ScaleClasses], occurring: Whole
) -> dict[Spec, CountedBlocks]:
    """Count all formats with one layout."""
    sharing: dict[bytes, list[Spec]] = defaultdict(list)
    for spec, each in classes.items():
        if not (layout.has_fill and (each.low == 0).any()):
            sharing[each.of_amax.tobytes()].append(spec)
    together = [(specs, PairBins.of([classes[spec] for spec in specs])) for specs in sharing.values()]
    together = [(specs, bins) for specs, bins in together if bins.size * VALUES_PER_BIN <= values.numel()]
    if not together:
        return {}
    blocks, several = count_pairs(values, layout, [bins for _, bins in together])
    return {
        spec: _quantised(classes[spec], bins.pairs(counts), blocks, occurring, values.dtype, spec)
        for (specs, bins), counts in zip(together, several, strict=True)
        for spec in specs
    }


def _quantised(
    classes: ScaleClasses,
    pairs: tuple[Whole, Whole, Whole],
    blocks: Whole,
    occurring: Whole,
    dtype: torch.dtype,
    spec: Spec,
) -> CountedBlocks:
    of_class, patterns, counts = pairs
    index = torch.from_numpy(classes.first[of_class])
    scales = BlockScales(*(of.ravel()[index] for of in classes.scales))
    before = values_of(patterns, dtype)
    found = on_scales(before, scales, spec)
    # All others become zero, whatever their scale. Their multiplier is Inf, as they are below every limit.
    rest = occurring - np.bincount(patterns, counts, MAGNITUDES).astype(np.int64)
    others = np.flatnonzero(rest)
    zeros = torch.zeros(others.size)
    used = np.flatnonzero(blocks[classes.amax])
    stored, _, after = (of.ravel()[torch.from_numpy(used)] for of in classes.scales)
    amax = values_of(classes.amax[used], dtype)
    return CountedBlocks(
        QuantisedPiece(
            torch.cat([before, values_of(others, dtype)]),
            torch.cat([found, zeros]),
            after=torch.cat([scales.after, zeros + torch.inf]),
        ),
        np.concatenate([counts, rest[others]]),
        QuantisedPiece(amax, amax, amax, after, stored),
        blocks[classes.amax[used]],
    )
