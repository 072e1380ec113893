"""A rule that fired, before it is an alert."""

from __future__ import annotations

from dataclasses import dataclass, field

from capd.rules.schema import TriggerSettings

__all__ = ["Firing"]


@dataclass(slots=True)
class Firing:
    """A rule that fired for one rank at one iteration.

    Attributes:
        rule: The rule.
        run_id: The run.
        rank: The rank.
        attempt: The attempt of the job.
        iteration: The iteration.
        micro_batch: The micro-batch of the first series.
        value: The value of the first series, or of the rank. It may be NaN or infinite.
        limit: The limit that it passed.
        opened_s: When it fired, on the caller's clock.
        is_last: Whether the rule's limit of a day is reached with it.
        paths: The paths of the series that fired, in order; empty for a rank.
    """

    rule: TriggerSettings
    run_id: str
    rank: int
    attempt: int
    iteration: int
    micro_batch: int
    value: float
    limit: float
    opened_s: float
    is_last: bool = False
    paths: dict[str, None] = field(default_factory=dict)
