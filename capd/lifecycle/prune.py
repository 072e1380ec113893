"""The pruning of a store root by a policy: the plan with reasons, and its execution."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from capd.errors import CapdError, ConfigError, StoreError
from capd.lifecycle.checks import check_root, why_held
from capd.lifecycle.inventory import RunFacts, inventory
from capd.lifecycle.policy import Candidate, Policy, Verdict, plan
from capd.lifecycle.trash import Release, TrashEntry, entries, finish, free, remove_run
from capd.lifecycle.uploaded import unsynced

__all__ = ["Planned", "free_due", "plan_for", "prune_now", "still_going"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A run and the policy's decision about it."""

    facts: RunFacts
    verdict: Verdict


def plan_for(root: Path, policy: Policy, *, is_unattended: bool = False) -> list[Planned]:
    """Return the decision about each run of a store root, the oldest first.

    Args:
        root: The store root.
        policy: The rules.
        is_unattended: Whether nobody looks at the plan, as in `plan`.

    Raises:
        ConfigError: The policy keeps nothing by any rule, or it would remove every run.
        NotAStore: The root is no directory.
    """
    check_root(root)
    if not policy:
        raise ConfigError(
            "no rule says what to keep, nothing removed; give --keep-last, --keep-within, --max-size or --keep-tag, "
            "or write [retention] into capd.toml"
        )
    # A run that a kill left half removed leaves with the others.
    runs = [facts for facts in inventory(root) if facts.state != "removing"]
    candidates = [_candidate(one) for one in runs]
    verdicts = plan(candidates, policy, time.time(), is_unattended=is_unattended)
    if policy.only_uploaded:
        verdicts = _without_unsynced(runs, candidates, verdicts, policy, is_unattended=is_unattended)
    kept = [verdict.keep for verdict in verdicts if verdict.run.is_counted]
    if not all(verdict.keep for verdict in verdicts) and not any(kept):
        raise ConfigError(
            f"these rules keep none of the {len(kept) or len(runs)} runs in {root}, nothing removed; add --keep-last "
            "1, or name the runs to `capd rm`"
        )
    return [Planned(facts, verdict) for facts, verdict in zip(runs, verdicts, strict=True)]


def _without_unsynced(
    runs: Sequence[RunFacts],
    candidates: list[Candidate],
    verdicts: list[Verdict],
    policy: Policy,
    *,
    is_unattended: bool,
) -> list[Verdict]:
    """Hold the runs that are not uploaded, of those that would go, and decide again until none of them goes.

    Only for a run that would go, the object store is asked.
    """
    asked: set[Path] = set()
    while True:
        changed = False
        for number, (facts, verdict) in enumerate(zip(runs, verdicts, strict=True)):
            if verdict.keep or facts.path in asked:
                continue
            asked.add(facts.path)
            if facts.records and _is_unsynced(facts.path):
                candidates[number] = replace(candidates[number], held="not uploaded")
                changed = True
        if not changed:
            return verdicts
        verdicts = plan(candidates, policy, time.time(), is_unattended=is_unattended)


def _is_unsynced(run: Path) -> bool:
    try:
        return bool(unsynced(run))
    except (CapdError, OSError):
        # Nobody can say that it is elsewhere.
        return True


def _candidate(facts: RunFacts) -> Candidate:
    held = why_held(facts)
    # The target of a link is counted at its own place.
    nbytes = 0 if facts.path.is_symlink() else facts.nbytes
    is_counted = held in ("", "pinned", "live") and facts.records > 0
    return Candidate(facts.path.name, facts.ended_s, nbytes, facts.tags, held, is_counted)


def still_going(planned: Iterable[Planned], now: Iterable[Planned]) -> list[Planned]:
    """Return the runs that a plan does not keep, without those that a later plan keeps or does not know any more."""
    going = {one.facts.path for one in now if not one.verdict.keep}
    return [one for one in planned if not one.verdict.keep and one.facts.path in going]


def prune_now(
    root: Path,
    going: Iterable[Planned],
    by: str,
    release: Release,
    failed: Callable[[Path, Exception], None],
) -> Iterator[RunFacts]:
    """Move runs into the trash. Yield each one that was moved.

    The caller holds the lock of the store's housekeeping.

    Args:
        root: The store root.
        going: The runs.
        by: The user that removes the runs.
        release: Asks the daemons that have a run open to let it go.
        failed: Is told of each run that could not be moved. The others go on.
    """
    finish(root, failed)
    for one in going:
        try:
            remove_run(one.facts.path, by, release, one.facts)
        except (CapdError, OSError) as error:
            failed(one.facts.path, error)
            continue
        yield one.facts


def free_due(
    root: Path, failed: Callable[[Path, Exception], None], *, everything: bool = False
) -> Iterator[tuple[TrashEntry, int]]:
    """Free what has been in the trash for seven days. Yield each entry with the freed bytes.

    The caller holds the lock of the store's housekeeping.

    Args:
        root: The store root.
        failed: Is told of each entry that could not be freed. The others go on.
        everything: Whether also newer entries are freed.
    """
    now_s = time.time()
    for entry in entries(root):
        if not (everything or entry.is_due(now_s)):
            continue
        try:
            yield entry, free(entry)
        except (StoreError, OSError) as error:
            failed(entry.place, error)
