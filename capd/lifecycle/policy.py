"""The plan of a retention policy: which runs it keeps, each with the reason. Pure.

A run is kept if any rule keeps it, as in restic. The size limit comes last: it removes the oldest of the runs that only
`keep_within` keeps, or no rule, until the rest fits. Runs that are held (live, pinned), tagged ones and the last
`keep_last` ones stay whatever their size.

What is no run of one's own, or has no records, is not counted: it takes no place among the last ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Candidate", "Policy", "Verdict", "age_text", "parse_age", "plan"]

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MOST_S = 1000 * 365 * 86_400.0
_RECENT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The runs to keep. A rule that is None or empty keeps nothing by itself.

    Attributes:
        keep_last: The number of newest runs.
        keep_within_s: The age of the last record up to which a run is kept, in seconds.
        max_nbytes: The bytes that all runs together may take.
        keep_tags: The tags of runs to keep.
        only_uploaded: Whether every run is kept that is not wholly in an object store. This is no rule by itself.
    """

    keep_last: int | None = None
    keep_within_s: float | None = None
    max_nbytes: int | None = None
    keep_tags: tuple[str, ...] = ()
    only_uploaded: bool = False

    def __bool__(self) -> bool:
        return replace(self, only_uploaded=False) != Policy()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run as a policy sees it.

    Attributes:
        name: The name of its directory.
        ended_s: The time of its last change, as seconds since 1970.
        nbytes: The bytes that it takes.
        tags: Its tags.
        held: Why it cannot be removed, whatever the policy says; "" if it can.
        is_counted: Whether it is one of the runs that "the last N" and "every run" mean.
    """

    name: str
    ended_s: float
    nbytes: int
    tags: tuple[str, ...] = ()
    held: str = ""
    is_counted: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a run. is_fixed: whether the size limit cannot change it."""

    run: Candidate
    keep: bool
    reason: str
    is_fixed: bool = True


def plan(
    runs: Sequence[Candidate], policy: Policy, now_s: float, *, is_unattended: bool = False
) -> list[Verdict]:
    """Return the decision about each run.

    Args:
        runs: The runs, the oldest first.
        policy: The rules.
        now_s: The current time, as seconds since 1970.
        is_unattended: Whether nobody looks at the plan. The newest run then stays, and so do those that changed less
            than an hour ago, because their jobs may continue them.

    Returns:
        The decisions in the order of the runs.
    """
    found: list[Verdict] = []
    newer = 0
    for run in reversed(runs):
        found.append(_by_rules(run, newer, policy, now_s, is_unattended))
        newer += run.is_counted
    found.reverse()
    if policy.max_nbytes is None:
        return found
    total = sum(one.run.nbytes for one in found if one.keep)
    for number, one in enumerate(found):
        if total <= policy.max_nbytes:
            break
        if one.keep and not one.is_fixed:
            total -= one.run.nbytes
            found[number] = replace(one, keep=False, reason="over the size limit")
    return found


def _by_rules(run: Candidate, newer: int, policy: Policy, now_s: float, is_unattended: bool) -> Verdict:
    """Return the decision of all rules but the size. newer: the number of newer runs that are counted."""
    age_s = max(0.0, now_s - run.ended_s)
    if run.held:
        return Verdict(run, True, run.held)
    tag = next((tag for tag in policy.keep_tags if tag in run.tags), None)
    if tag is not None:
        return Verdict(run, True, f"tag {tag}")
    if policy.keep_last is not None and newer < policy.keep_last:
        return Verdict(run, True, f"one of the last {policy.keep_last}")
    if is_unattended and not newer:
        return Verdict(run, True, "the newest run")
    if is_unattended and age_s < _RECENT_S:
        return Verdict(run, True, "changed less than an hour ago")
    if policy.keep_within_s is not None and age_s <= policy.keep_within_s:
        return Verdict(run, True, f"{age_text(age_s)} old", is_fixed=False)
    if policy.keep_last is None and policy.keep_within_s is None and not policy.keep_tags:
        return Verdict(run, True, "within the size limit", is_fixed=False)
    return Verdict(run, False, f"{age_text(age_s)} old, no rule keeps it")


def parse_age(text: object) -> float:
    """Return an age such as "30d", "12h" or "2w" in seconds.

    Raises:
        ValueError: The value is no age. The message says what is accepted.
    """
    match = _AGE.fullmatch(text.strip()) if isinstance(text, str) else None
    age_s = float(match[1]) * _UNITS[match[2]] if match else None
    if age_s is None or age_s > _MOST_S:
        raise ValueError(f"{text!r} is not an age; write a number with s, m, h, d or w: 30d, 12h, 2w")
    return age_s


def age_text(age_s: float) -> str:
    """Return an age for people, in its largest whole unit: 45 d, 3 h, 20 s."""
    for unit in ("d", "h", "m"):
        if age_s >= _UNITS[unit]:
            return f"{age_s / _UNITS[unit]:.0f} {unit.replace('m', 'min')}"
    return f"{age_s:.0f} s"
