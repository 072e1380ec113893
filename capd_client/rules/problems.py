"""Finds the rules, or parts of rules, that select nothing in a model or contradict each other."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple, Optional

from capd_client.process.text import number_ranges
from capd_client.rules.resolve import Resolved, Rule, Target
from capd_client.rules.schema import RuleSettings, texts

__all__ = ["Part", "Problem", "met_by", "problems_of"]

_SHOWN = 3

Part = tuple[int, str]
"""A part of a rule that a model can lack: the rule's number, and "modules", "layers", "tensor NAME" or "slice NAME"."""


class Problem(NamedTuple):
    """A sentence about rules on a model.

    part: The part of a rule that the model lacks; None if two rules contradict each other.
    """

    text: str
    part: Optional[Part] = None


def problems_of(resolved: Resolved, *, whole: bool) -> list[Problem]:
    """Return the problems of the rules on this model: parts that select nothing, and contradictions.

    Args:
        resolved: The rules and the model's modules.
        whole: False if the model may be one part of a larger one, such as a pipeline stage. Other ranks may then have
            the layers and modules that this one lacks, so their absence is no problem.
    """
    problems = []
    for number, rule in enumerate(resolved.rules):
        targets = [resolved.targets[at] for at in resolved.chosen[number]]
        found = _unusable(rule, targets) if targets else []
        if whole:
            found += _layers_beyond(rule, resolved.targets) if targets else _nothing(rule, resolved.targets)
        problems += [Problem(f"rule {rule.name!r}{text}", (number, lacking)) for lacking, text in found]
    return problems + [Problem(text) for text in _contradictions(resolved)]


def met_by(resolved: Resolved, problems: Iterable[Problem]) -> set[Part]:
    """Return the parts of the rules that the model has."""
    lacking = {problem.part for problem in problems}
    return {
        (number, part)
        for number, rule in enumerate(resolved.rules)
        if resolved.chosen[number]
        for part in _parts(rule.settings)
        if (number, part) not in lacking
    }


def _parts(rule: RuleSettings) -> list[str]:
    slices = rule.slices if isinstance(rule.slices, dict) else ()
    return [
        "modules", "layers", *(f"tensor {name}" for name in texts(rule.tensors)), *(f"slice {n}" for n in slices)
    ]  # fmt: skip


def _nothing(rule: Rule, targets: Sequence[Target]) -> list[tuple[str, str]]:
    reasons = [rule.leaves_out(target) for target in targets]
    left = next((r for r in ("layers", "components", "exclude", "include") if r in reasons), None)
    matched = sum(reason is None for reason in reasons)
    if matched:
        have = dict.fromkeys(
            name for target in targets if not rule.leaves_out(target) for name in target.tensors
        )
        wanted = ", ".join(sorted(rule.tensors or ())) or "such tensors"
        return [("modules", f": none of its {matched} modules has {wanted}; they have {', '.join(have)}")]
    stage = [target for target, reason in zip(targets, reasons, strict=True) if reason == left]
    return [("modules", f" matches nothing: {_why(rule, left, stage)}")]


def _why(rule: Rule, left: Optional[str], stage: Sequence[Target]) -> str:
    """Say why a rule matches nothing. `stage` holds the modules that the last filter, `left`, excludes."""
    if left == "layers" and rule.layers is not None:
        layers = sorted({target.layer for target in stage if target.layer is not None})
        lie = f"are in layers {number_ranges(layers)}" if layers else "are in no layer"
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


def _unusable(rule: Rule, targets: Sequence[Target]) -> list[tuple[str, str]]:
    """Find named tensors that no module of the rule has, and slices of tensors that the rule does not capture."""
    have = dict.fromkeys(name for target in targets for name in target.tensors)
    problems = [
        (f"tensor {name}", f": none of its {len(targets)} modules has {name}; they have {', '.join(have)}")
        for name in texts(rule.settings.tensors)
        if name not in have
    ]
    captured = {name for target in targets for name in rule.tensors_of(target)}
    sliced = rule.settings.slices if isinstance(rule.settings.slices, dict) else ()
    idle = [name for name in sliced if name not in captured]
    return problems + [(f"slice {name}", f": slices of {name}, which it does not capture") for name in idle]


def _layers_beyond(rule: Rule, targets: Sequence[Target]) -> list[tuple[str, str]]:
    layers = [
        target.layer
        for target in targets
        if target.layer is not None and rule.leaves_out(target) in (None, "layers")
    ]
    beyond = rule.layers.beyond(max(layers) + 1) if rule.layers is not None and layers else None
    if rule.layers is None or beyond is None:
        return []
    lie = f"its modules are in layers 0-{max(layers)}"
    return [("layers", f': layers "{rule.layers.text}" name layer {beyond}; {lie}')]


def _contradictions(resolved: Resolved) -> list[str]:
    """Describe pairs of rules that want one tensor of one module in two ways at the same moments."""
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
                f"{one.name!r} wins"
            )
        stores = {one.settings.store, two.settings.store}
        if shared and stores in ({"stats", "full"}, {"stats", "both"}) and one.when.equals(two.when):
            problems.append(
                f"{_both(one, two, shared)} in the same steps, as {one.store} and as {two.store}; both are kept, "
                'and one rule with store = "both" does the same'
            )
    return problems


def _both(one: Rule, two: Rule, shared: Sequence[tuple[Target, str]]) -> str:
    target, name = shared[0]
    more = f" (and {len(shared) - 1} more)" if len(shared) > 1 else ""
    return f"rules {one.name!r} and {two.name!r} contradict each other: both capture {name} of {target.module}{more}"


def _text(rule: Rule, name: str) -> str:
    return rule.slices[name].text if name in rule.slices else "whole"
