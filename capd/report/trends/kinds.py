"""The kinds of metrics: their words, their formulas, and how each is measured on one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from capd.analyze.format_choice import FormatChoice
from capd.analyze.trends.amax_history import DelayedScales
from capd.analyze.trends.hot_channels import HotSets, channel_energies
from capd.analyze.trends.moments import power_sums
from capd.analyze.trends.noise import NOISE_LIMIT, noise_ratios
from capd.analyze.trends.oscillation import Flips, code_snapshot
from capd.analyze.trends.spectrum import spectrum_of
from capd.analyze.trends.sums import Problems, TrendSums
from capd.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["DEFAULT_TRENDS", "TRENDS", "Follower", "TrendKind", "TrendOptions", "TrendPoint", "trend_kinds"]

TrendPoint = tuple[int, str, TrendSums]
"""The sums of one series at one step: iteration, label, sums."""
Found = tuple[Mapping[str, TrendSums], Problems]
Measure = Callable[["torch.Tensor", "TrendOptions"], Found]
Snapshot = Callable[["torch.Tensor", "TrendOptions"], tuple[Any, Problems]]


@dataclass(frozen=True, slots=True)
class TrendOptions:
    """The options of the metrics.

    Attributes:
        choices: The formats, empty for the default of each metric.
        sizes: The sizes of Hadamard transforms.
        top: The number of hot channels, and of singular values.
        windows, margins: Those of delayed scaling.
    """

    choices: Sequence[FormatChoice] = ()
    sizes: Sequence[int] = (16, 32, 64, 128)
    top: int = 8
    windows: Sequence[int] = (1, 16, 1024)
    margins: Sequence[int] = (0,)


class Follower(Protocol):
    """Follows one series, whose records come in the order of their steps."""

    def add(self, iteration: int, found: Any, /) -> Iterator[TrendPoint]:
        """Add what was found on a record. Yields the steps that this completes."""
        ...

    def close(self) -> Iterator[TrendPoint]:
        """Yield the steps that are still open, at the end of the series."""
        ...


@dataclass(frozen=True, slots=True)
class TrendKind:
    """A kind of metric.

    Attributes:
        name: Its word on the command line.
        title: Its title.
        formula: What it is, in one line.
        plotted: The numbers that figures draw over the steps.
        measure: Measures one tensor on its own, by label.
        snapshot: Finds what following a series needs of one tensor. `measure` is None then.
        follower: Follows a series.
        formats: The formats by default, "" for a metric without formats.
        reads: "elements"; "statistics" if stored statistics are enough; "products" of input and weight.
        work: The memory that measuring takes, by the bytes of a record.
        pairs: The number that counts the steps with an earlier one, "" for a metric of single steps.
        lines: Reference lines of figures: their numbers and what they say.
    """

    name: str
    title: str
    formula: str
    plotted: tuple[str, ...]
    measure: Measure | None = None
    snapshot: Snapshot | None = None
    follower: Callable[[TrendOptions], Follower] | None = None
    formats: str = ""
    reads: Literal["elements", "statistics", "products"] = "elements"
    work: int = 10
    pairs: str = ""
    lines: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def choices(self, options: TrendOptions) -> Sequence[FormatChoice]:
        """Return the formats that were named, or the metric's own."""
        from capd.analyze.format_choice import choices

        if not self.formats:
            return ()
        return options.choices or (() if self.formats == "none" else choices(self.formats))


def _noise(values: torch.Tensor, options: TrendOptions) -> Found:
    return noise_ratios(values, options.choices)


def _scales(values: torch.Tensor, options: TrendOptions) -> Found:
    from capd.analyze.trends.block_scales import block_scale_counts

    return block_scale_counts(values, options.choices)


def _last_bucket(values: torch.Tensor, options: TrendOptions) -> Found:
    from capd.analyze.trends.grid_ends import LastBucket, grid_ends

    return grid_ends(values, options.choices, LastBucket)


def _dead_zone(values: torch.Tensor, options: TrendOptions) -> Found:
    from capd.analyze.trends.grid_ends import DeadZone, grid_ends

    return grid_ends(values, options.choices, DeadZone)


def _hadamard(values: torch.Tensor, options: TrendOptions) -> Found:
    from capd.analyze.trends.hadamard_effect import hadamard_effects

    return hadamard_effects(values, options.choices, options.sizes)


def _kurtosis(values: torch.Tensor, _: TrendOptions) -> Found:
    return {"": power_sums(values)}, []


def _rank(values: torch.Tensor, options: TrendOptions) -> Found:
    found = spectrum_of(values, options.top)
    return ({}, [found]) if isinstance(found, str) else ({f"top {options.top}": found}, [])


def _channels(values: torch.Tensor, _: TrendOptions) -> tuple[Any, Problems]:
    found = channel_energies(values)
    return found, ["it has no last axis, or no values"] if found is None else []


def _codes(values: torch.Tensor, options: TrendOptions) -> tuple[Any, Problems]:
    if not values.numel():
        return None, ["it has no values"]
    return code_snapshot(values, options.choices)


_BLOCKS, _ALL = "mxfp8,mxfp4,nvfp4", "mxfp8,mxfp4,nvfp4,hifp8"
_KINDS = (
    TrendKind(
        "noise-ratio", "Norm over quantisation noise", "‖g‖ / (σ_q √N) with σ_q² = mean d²",
        ("ratio",), _noise, formats=_ALL, lines={"ratio": (NOISE_LIMIT, "√3")},
    ),
    TrendKind(
        "scales", "Scales of blocks", "the stored scale of each block, and std of log2(scale) within rows",
        ("entropy_bits", "row_log2_std"), _scales, formats=_BLOCKS,
    ),
    TrendKind(
        "last-bucket", "Values in the last bucket", "share of values that become ± the largest value of the grid",
        ("last_percent", "full_blocks_percent"), _last_bucket, formats=_BLOCKS,
    ),
    TrendKind(
        "dead-zone", "Values in the dead zone", "share of 0 < |x| < half the smallest step under its scale",
        ("dead_percent",), _dead_zone, formats=_ALL,
    ),
    TrendKind(
        "kurtosis", "Kurtosis and crest factor", "E[(x - µ)⁴] / σ⁴, max|x| / RMS", ("kurtosis", "crest_factor"),
        _kurtosis, lines={"kurtosis": (3.0, "normal")},
    ),
    TrendKind(
        "hadamard", "Effect of a Hadamard transform",
        "SQNR, kurtosis and range of blocks of x and of x (I ⊗ diag(s) H)",
        ("gain_db", "kurtosis_after", "block_crest_after"), _hadamard, formats="mxfp4,nvfp4",
        lines={"gain_db": (0.0, "no gain")},
    ),
    TrendKind(
        "channels", "Hot channels", "the k channels of the largest Σx²: Jaccard with earlier steps, share of Σx²",
        ("jaccard_previous", "jaccard_first", "energy_percent"), snapshot=_channels,
        follower=lambda options: HotSets(options.top), pairs="pairs",
    ),
    TrendKind(
        "oscillation", "Oscillation of quantised weights",
        "share of codes that changed, Σ|Δq| / Σ|Δw|, distance to the nearest rounding edge in steps",
        ("changed_percent", "ratio", "edge_distance"), snapshot=_codes, follower=lambda _: Flips(),
        formats="mxfp4,nvfp4", work=20, pairs="pairs", lines={"ratio": (1.0, "as the weights")},
    ),
    TrendKind(
        "amax-history", "Delayed scaling", "|x| > L = max amax of the last steps · 2^margin; log2(L / amax)",
        ("amax", "overflow_percent", "wasted_binades"), reads="statistics",
        follower=lambda options: DelayedScales(options.windows, options.margins), pairs="judged",
    ),
    TrendKind(
        "rank", "Stable rank", "‖x‖_F² / ‖x‖₂², and the share of Σσ² in the k largest", ("stable_rank", "top_percent"),
        _rank,
    ),
    TrendKind(
        "accumulation", "Accumulation in fewer bits", "Y = X Wᵀ with partial sums in fp32, bf16 and 14 bits",
        ("sqnr_db", "normalised_l2"), formats="none", reads="products",
    ),
)  # fmt: skip
TRENDS: Mapping[str, TrendKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""The kinds by their words on the command line."""
DEFAULT_TRENDS = "noise-ratio,scales,last-bucket,dead-zone,kurtosis"


def trend_kinds(text: str) -> tuple[TrendKind, ...]:
    """Return the kinds that `text` names: "noise-ratio,scales", each once. Raises ConfigError for another word."""
    found = dict.fromkeys(word.strip() for word in text.split(","))
    for word in found:
        if word not in TRENDS:
            raise ConfigError(f"--metric {word!r} is not known; use some of {', '.join(TRENDS)}")
    return tuple(TRENDS[word] for word in found)
