"""The question that tasks answer: what is measured on each record, and how records are grouped. It is plain JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from capd.analyze.format_choice import FormatChoice, choices
from capd.analyze.groups import GROUP_FIELDS, Fields, Groups
from capd.errors import ConfigError
from capd.io.sample import Sample
from capd.report.gather import GatheredRecords
from capd.report.products.linear_calls import LinearCalls
from capd.report.series import SeriesSummaries

__all__ = ["Question"]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question to records.

    Attributes:
        formats: The labels of the formats to measure.
        groupings: The fields of each grouping, and whether it keeps distributions.
        with_channels, coarse: The groupings that keep channels, and those that keep coarse distributions.
        quick, per_block, channels: As in `capd.report.gather.gather`.
        series, calls: Whether to keep the summary of each series, and the calls of linear layers.
        share: The share of the records of each series to read.
    """

    formats: tuple[str, ...] = ()
    groupings: tuple[tuple[Fields, bool], ...] = (((), True),)
    with_channels: tuple[Fields, ...] = ()
    coarse: tuple[Fields, ...] = ()
    quick: bool = False
    per_block: bool = False
    channels: bool = False
    series: bool = False
    calls: bool = False
    share: float = 1.0

    @classmethod
    def of(cls, gathered: GatheredRecords, share: float, **asked: Any) -> Question:
        """Return the question that `capd.report.gather.gather` would answer with these arguments."""
        groups = gathered.groups
        return cls(
            formats=tuple(choice.label for choice in asked.pop("choices", ())),
            groupings=tuple(groups.groupings.items()),
            with_channels=tuple(sorted(groups.channels)),
            coarse=tuple(sorted(groups.coarse)),
            series=gathered.series is not None,
            calls=gathered.calls is not None,
            share=share,
            **asked,
        )

    @property
    def choices(self) -> tuple[FormatChoice, ...]:
        """The formats. Imports torch if there are any. Raises ConfigError for an unknown one."""
        return choices(",".join(self.formats)) if self.formats else ()

    @property
    def measured(self) -> dict[str, Any]:
        """The arguments of `capd.report.gather.gather_part`."""
        return {
            "quick": self.quick,
            "choices": self.choices,
            "per_block": self.per_block,
            "channels": self.channels,
        }

    def gathered(self) -> GatheredRecords:
        """Return the answer before any record. Raises ConfigError if a field is unknown."""
        for name in (name for fields, _ in self.groupings for name in fields):
            if name not in GROUP_FIELDS:
                raise ConfigError(f"a task groups by {name!r}, which is no field")
        return GatheredRecords(
            groups=Groups(dict(self.groupings), frozenset(self.with_channels), frozenset(self.coarse)),
            series=SeriesSummaries() if self.series else None,
            calls=LinearCalls() if self.calls else None,
            sample=Sample(self.share) if self.share < 1 else None,
        )
