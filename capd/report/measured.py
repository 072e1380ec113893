"""The measurements of one item: its statistics and, if requested, distribution, errors of formats and channels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from capd.analyze.block_ranges import RANGE_BLOCKS, BlockRanges, block_ranges
from capd.analyze.channels import channels_of
from capd.analyze.distribution import distribution_of
from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.groups import Tally
from capd.io.items import UNREADABLE, Item, Loaded, Skipped, skipped
from capd.store.format.statistics import merge_stats, public, summarise
from capd.store.read.series import tensor_of

if TYPE_CHECKING:
    import torch

__all__ = ["NOT_MEASURED", "OUTSIDE_SAMPLE", "Measured", "Measurements", "measure"]

NOT_MEASURED = "it is in the sample, and was not measured while capturing"
OUTSIDE_SAMPLE = "it is outside of the sample that was measured while capturing"


@dataclass(frozen=True, slots=True)
class Measurements:
    """The requested measurements of an item.

    Attributes:
        quick: Whether to use only stored statistics.
        choices: The formats to measure.
        per_block: Whether to measure the spread of the blocks' errors and the range of the values in blocks.
        channels: Whether to measure the channels.
        stored: Whether to take the errors that were measured while capturing, of all formats or of `labels`.
        labels: The formats.
    """

    quick: bool = False
    choices: Sequence[FormatChoice] = ()
    per_block: bool = False
    channels: bool = False
    stored: bool = False
    labels: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of an item. `unmeasured`: the reason why some formats have no error, or all."""

    loaded: Loaded
    tally: Tally
    has_statistics: bool = True
    unmeasured: list[str] = field(default_factory=list)


def measure(item: Item, wanted: Measurements) -> Measured | Skipped | None:
    """Load and measure one item. Return None if it is outside of the selection."""
    try:
        loaded = item.load()
        if loaded is not None and wanted.stored:
            return _stored(loaded, wanted.labels)
        return None if loaded is None else _measured(loaded, wanted, item.is_sampled and not wanted.quick)
    except UNREADABLE as error:
        return skipped(item.name, error)


def _measured(loaded: Loaded, wanted: Measurements, is_read: bool) -> Measured:
    stats, distribution, channels = loaded.stats, None, None
    errors: dict[str, Errors] = {}
    ranges: dict[str, BlockRanges] = {}
    unmeasured = [loaded.no_source] if wanted.choices and loaded.no_source is not None else []
    if loaded.read is not None and is_read:
        bits = loaded.read()
        distribution = distribution_of(bits, loaded.dtype)
        stats = stats or public(summarise(bits, loaded.dtype))
        if wanted.choices and not unmeasured:
            # The import needs torch, which a report without formats does not load.
            from capd.analyze.measure import measure_each

            values = tensor_of(bits, loaded.dtype)
            errors, unmeasured = measure_each(
                values, distribution, wanted.choices, per_block=wanted.per_block
            )
            ranges = _ranges(values) if wanted.per_block else {}
        if wanted.channels:
            channels = channels_of(bits, loaded.dtype, stats.std)
    tally = Tally(1, loaded.raw_bytes, stats or merge_stats(()), distribution, errors, channels, ranges)
    return Measured(loaded, tally, stats is not None, unmeasured)


def _stored(loaded: Loaded, labels: Sequence[str] | None) -> Measured:
    """Return the errors that were measured while capturing. Reads no element."""
    errors: dict[str, Errors] = {}
    problem = loaded.no_high_precision
    if problem is None:
        found = {} if loaded.errors is None else loaded.errors()
        errors = {label: one for label, one in found.items() if labels is None or label in labels}
        problem = None if errors else _why_not_stored(loaded, found)
    tally = Tally(1, loaded.raw_bytes, loaded.stats or merge_stats(()), errors=errors)
    return Measured(loaded, tally, loaded.stats is not None, [] if problem is None else [problem])


def _why_not_stored(loaded: Loaded, found: Collection[str]) -> str:
    if found:
        return f"it was measured while capturing in {', '.join(found)} alone"
    if loaded.error_sample is None:
        return "no record of its series was measured while capturing"
    return OUTSIDE_SAMPLE if loaded.is_outside_sample else NOT_MEASURED


def _ranges(values: torch.Tensor) -> dict[str, BlockRanges]:
    found = {name: block_ranges(values, *block) for name, block in RANGE_BLOCKS.items()}
    return {name: ranges for name, ranges in found.items() if ranges is not None}
