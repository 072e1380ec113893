"""The look at one item: its statistics and, if requested, its distribution, errors of formats and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from capd.analyze.block_ranges import RANGE_BLOCKS, BlockRanges, block_ranges
from capd.analyze.channels import channels_of
from capd.analyze.distribution import Distribution, distribution_of
from capd.analyze.error_sums import Errors
from capd.analyze.format_choice import FormatChoice
from capd.analyze.groups import Tally
from capd.errors import CapdError
from capd.io.items import Item, Loaded
from capd.store.format.statistics import merge_stats, public, summarise
from capd.store.read.series import tensor_of
from capd_client.process.text import printable

__all__ = ["Asked", "Seen", "Skipped", "look"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record or file that could not be read, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """The requested measurements of an item.

    Attributes:
        quick: Whether to use only stored statistics.
        choices: The formats to measure.
        per_block: Whether to measure the spread of the blocks' errors and the range of the values in blocks.
        channels: Whether to measure the channels.
    """

    quick: bool = False
    choices: Sequence[FormatChoice] = ()
    per_block: bool = False
    channels: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """The measurements of an item. `unmeasured`: the reason why some formats have no error, or all."""

    loaded: Loaded
    tally: Tally
    has_statistics: bool = True
    unmeasured: list[str] = field(default_factory=list)


def look(item: Item, asked: Asked) -> Seen | Skipped | None:
    """Load and measure one item. Return None if it is outside of the selection."""
    try:
        loaded = item.load()
        return None if loaded is None else _seen(loaded, asked)
    except (CapdError, OSError, RuntimeError, MemoryError) as error:
        # The record is damaged, or torch lacks memory.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Skipped(item.name, printable(reason[:500]))


def _seen(loaded: Loaded, asked: Asked) -> Seen:
    stats, distribution, channels = loaded.stats, None, None
    errors: dict[str, Errors] = {}
    ranges: dict[str, BlockRanges] = {}
    unmeasured = [loaded.no_source] if asked.choices and loaded.no_source is not None else []
    if loaded.read is not None and not asked.quick:
        bits = loaded.read()
        distribution = distribution_of(bits, loaded.dtype)
        stats = stats or public(summarise(bits, loaded.dtype))
        if asked.choices and not unmeasured:
            errors, unmeasured = _measure(bits, loaded.dtype, distribution, asked)
            ranges = _ranges(bits, loaded.dtype) if asked.per_block else {}
        if asked.channels:
            channels = channels_of(bits, loaded.dtype, stats.std)
    tally = Tally(1, loaded.raw_bytes, stats or merge_stats(()), distribution, errors, channels, ranges)
    return Seen(loaded, tally, stats is not None, unmeasured)


def _measure(
    bits: NDArray[np.generic], dtype: str, distribution: Distribution, asked: Asked
) -> tuple[dict[str, Errors], list[str]]:
    # The import needs torch, which a report without formats does not load.
    from capd.analyze.measure import measure_each

    return measure_each(tensor_of(bits, dtype), distribution, asked.choices, per_block=asked.per_block)


def _ranges(bits: NDArray[np.generic], dtype: str) -> dict[str, BlockRanges]:
    values = tensor_of(bits, dtype)
    found = {name: block_ranges(values, *block) for name, block in RANGE_BLOCKS.items()}
    return {name: ranges for name, ranges in found.items() if ranges is not None}
