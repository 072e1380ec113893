"""What is told of rules when a model is watched: the plan as a table, and what cannot be meant as it is written."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, groupby
from typing import Optional

from capd_client.rule_settings import RuleSettings, texts
from capd_client.rules import Resolved, Rule, Target, run_together

__all__ = ["counted", "plan_lines", "problems_of", "rank_left_out", "rank_problems", "tensors_text"]

_SHOWN = 3


def plan_lines(resolved: Resolved) -> list[str]:
    """A table: each rule with its modules, tensors, moments, and what is kept."""
    rows = [("rule", "modules", "tensors", "steps", "keeps")]
    for number, rule in enumerate(resolved.rules):
        targets = [resolved.targets[at] for at in resolved.chosen[number]]
        rows.append(
            (rule.name, _modules(targets), tensors_text(rule, targets) or "-", _moments(rule), rule.store)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _modules(targets: Sequence[Target]) -> str:
    if not targets:
        return "none"
    layers = sorted({target.layer for target in targets if target.layer is not None})
    if not layers:
        return counted(targets)
    return f"{counted(targets)} in layer{'s' * (len(layers) > 1)} {_compact(layers)}"


def counted(targets: Sequence[Target]) -> str:
    """How many products of which component a forward can run."""
    counts = Counter(target.component for target in run_together(targets))
    return ", ".join(f"{count} {component}" for component, count in counts.items())


def _compact(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: 0-2, 7."""
    parts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)


def tensors_text(rule: Rule, targets: Iterable[Target]) -> str:
    """What the rule captures of them, with its slices."""
    names = dict.fromkeys(name for target in targets for name in rule.tensors_of(target))
    return ", ".join(f"{name} ({rule.slices[name].text})" if name in rule.slices else name for name in names)


def _moments(rule: Rule) -> str:
    steps, micro_batches, ranks = rule.when
    some = "" if micro_batches is None else f", micro-batches {micro_batches.text}"
    return steps.text + some + ("" if ranks is None else f", ranks {ranks.text}")


def rank_problems(rules: Iterable[Rule], world_size: int) -> list[str]:
    """Ranks that the job does not have."""
    found: dict[str, str] = {}
    for rule in rules:
        ranks = rule.when.ranks
        beyond = None if ranks is None else ranks.beyond(world_size)
        if ranks is not None and beyond is not None:
            found.setdefault(
                ranks.text,
                f'{_of(rule)}ranks "{ranks.text}" name rank {beyond}; this job has '
                + (f"ranks 0-{world_size - 1}" if world_size > 1 else "rank 0 alone"),
            )
    return list(found.values())


def rank_left_out(resolved: Resolved, rank: int) -> str:
    """Which of the rules that match something do not capture it on this rank; "" where all of them do."""
    matching = [rule for rule, chosen in zip(resolved.rules, resolved.chosen, strict=True) if chosen]
    without = [
        (rule.name, f'ranks "{rule.when.ranks.text}"')
        for rule in matching
        if rule.when.ranks is not None and rank not in rule.when.ranks
    ]
    if without and len(without) == len(matching):
        why = ", ".join(dict.fromkeys(ranks for _, ranks in without))
        return f"nothing is captured on rank {rank}: {why} leave it out"
    rules = ", ".join(f"rule {name!r} ({ranks})" for name, ranks in without)
    return f"not captured on rank {rank}: {rules}" if rules else ""


def _of(rule: Rule) -> str:
    return "" if rule.settings.ranks is None else f"rule {rule.name!r}: "


def problems_of(resolved: Resolved, *, whole: bool, elsewhere: Sequence[RuleSettings] = ()) -> list[str]:
    """What of the rules comes to nothing, or contradicts itself, on this model; a sentence each.

    whole: False where the model may be a part of one, as a pipeline stage is: then other ranks may have the layers and
    modules that this one lacks. elsewhere: the rules that need match nothing here, for they are of other models.
    """
    problems = []
    for number, rule in enumerate(resolved.rules):
        targets = [resolved.targets[at] for at in resolved.chosen[number]]
        if not targets:
            blamed = whole and rule.settings not in elsewhere
            problems += [_nothing(rule, resolved.targets)] if blamed else []
            continue
        problems += _unusable(rule, targets)
        problems += _layers_beyond(rule, resolved.targets) if whole else []
    return problems + _contradictions(resolved)


def _nothing(rule: Rule, targets: Sequence[Target]) -> str:
    reasons = [rule.leaves_out(target) for target in targets]
    left = next((r for r in ("layers", "components", "exclude", "include") if r in reasons), None)
    matched = sum(reason is None for reason in reasons)
    if matched:
        have = _sorted_by_use(
            name for target in targets if not rule.leaves_out(target) for name in target.tensors
        )
        wanted = ", ".join(sorted(rule.tensors or ())) or "such tensors"
        return f"rule {rule.name!r}: none of its {matched} modules has {wanted}; they have {', '.join(have)}"
    stage = [target for target, reason in zip(targets, reasons, strict=True) if reason == left]
    return f"rule {rule.name!r} matches nothing: {_why(rule, left, stage)}"


def _why(rule: Rule, left: Optional[str], stage: Sequence[Target]) -> str:
    """stage: the modules that this filter, the last one that any module came to, leaves out."""
    if left == "layers" and rule.layers is not None:
        layers = sorted({target.layer for target in stage if target.layer is not None})
        lie = f"are in layers {_compact(layers)}" if layers else "are in no layer"
        return f'layers "{rule.layers.text}", and its modules {lie}'
    if left == "components":
        have = sorted({target.component for target in stage})
        wanted = texts(rule.settings.components)
        lower = {name.lower(): name for name in have}
        near = [n for w in wanted for n in difflib.get_close_matches(w.lower(), lower, n=1)]
        hint = f"; did you mean {lower[near[0]]}?" if near else ""
        return f"components {', '.join(wanted)}, and its modules are of {', '.join(have)}{hint}"
    names = [target.module for target in stage]
    some = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    if left == "exclude":
        return f"exclude leaves out {some}"
    return f"no module's name fits ({some})"


def _unusable(rule: Rule, targets: Sequence[Target]) -> list[str]:
    """Tensors that the rule names for modules that have none of the kind."""
    have = _sorted_by_use(name for target in targets for name in target.tensors)
    problems = []
    missing = [name for name in texts(rule.settings.tensors) if name not in have]
    if missing:
        problems.append(
            f"rule {rule.name!r}: none of its {len(targets)} modules has {', '.join(missing)}; "
            f"they have {', '.join(have)}"
        )
    captured = {name for target in targets for name in rule.tensors_of(target)}
    if isinstance(rule.settings.slices, dict):
        idle = [name for name in rule.settings.slices if name not in captured]
        if idle:
            problems.append(f"rule {rule.name!r}: slices of {', '.join(idle)}, which it does not capture")
    return problems


def _sorted_by_use(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _layers_beyond(rule: Rule, targets: Sequence[Target]) -> list[str]:
    layers = [
        target.layer
        for target in targets
        if target.layer is not None and rule.leaves_out(target) in (None, "layers")
    ]
    beyond = rule.layers.beyond(max(layers) + 1) if rule.layers is not None and layers else None
    if rule.layers is None or beyond is None:
        return []
    return [
        f'rule {rule.name!r}: layers "{rule.layers.text}" name layer {beyond}; '
        f"its modules are in layers 0-{max(layers)}"
    ]


def _contradictions(resolved: Resolved) -> list[str]:
    """Pairs of rules that want one tensor of one module in two ways at the same moments."""
    problems = []
    for (number, one), (other, two) in combinations(enumerate(resolved.rules), 2):
        if not one.when.meets(two.when):
            continue
        both = set(resolved.chosen[number]).intersection(resolved.chosen[other])
        shared = [
            (resolved.targets[at], name)
            for at in sorted(both)
            for name in one.tensors_of(resolved.targets[at])
            if name in two.tensors_of(resolved.targets[at])
        ]
        sliced = [(target, name) for target, name in shared if _text(one, name) != _text(two, name)]
        if sliced:
            name = sliced[0][1]
            problems.append(
                f"{_both(one, two, sliced)} in the same steps, as {_text(one, name)} and as {_text(two, name)}; "
                f"what {one.name!r} says is kept"
            )
        stores = {one.settings.store, two.settings.store}
        if shared and stores in ({"stats", "full"}, {"stats", "both"}) and one.when.equals(two.when):
            problems.append(
                f"{_both(one, two, shared)} in the same steps, as {one.store} and as {two.store}; both are kept, "
                'which store = "both" of one rule says as well'
            )
    return problems


def _both(one: Rule, two: Rule, shared: Sequence[tuple[Target, str]]) -> str:
    target, name = shared[0]
    more = f" (and {len(shared) - 1} more)" if len(shared) > 1 else ""
    return f"rules {one.name!r} and {two.name!r} contradict each other: both capture {name} of {target.module}{more}"


def _text(rule: Rule, name: str) -> str:
    return rule.slices[name].text if name in rule.slices else "whole"
