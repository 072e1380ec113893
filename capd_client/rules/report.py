"""Describes rules in words when a model is watched: the plan as a table, and problems with the ranks they name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from capd_client.process.text import number_ranges, table_lines
from capd_client.rules.resolve import Resolved, Rule, Target, run_together

__all__ = ["counted", "in_words", "plan_lines", "rank_left_out", "rank_problems", "tensors_text"]


def in_words(what: str, resolved: Resolved, *, simple: bool) -> tuple[str, str]:
    """Describe a watched model in one line, and as log text.

    Args:
        what: The name of the watched model.
        resolved: The rules and the model's modules.
        simple: Whether one line describes everything. Otherwise the log text holds the rules as a table.
    """
    if not simple:
        rules = ", ".join(repr(rule.name) for rule in resolved.rules)
        table = "\n".join(f"  {line}" for line in plan_lines(resolved))
        return f"{what} by the rules {rules}", f"{what}:\n{table}"
    rule, chosen = resolved.rules[0], [resolved.targets[at] for at in resolved.chosen[0]]
    steps = rule.when.steps.text
    line = f'{what} ({counted(chosen)}): {tensors_text(rule, chosen)} in steps "{steps}"'
    wider = "" if steps == "all" else '; widen it with steps="all", CAPD_STEPS or [when] steps in capd.toml'
    return line, line + wider


def plan_lines(resolved: Resolved) -> list[str]:
    """Return the lines of a table: each rule with its modules, tensors, moments and store."""
    rows = []
    for number, rule in enumerate(resolved.rules):
        targets = [resolved.targets[at] for at in resolved.chosen[number]]
        rows.append(
            (rule.name, _modules(targets), tensors_text(rule, targets) or "-", _moments(rule), rule.store)
        )
    return table_lines(("rule", "modules", "tensors", "steps", "keeps"), rows)


def _modules(targets: Sequence[Target]) -> str:
    if not targets:
        return "none"
    layers = sorted({target.layer for target in targets if target.layer is not None})
    if not layers:
        return counted(targets)
    return f"{counted(targets)} in layer{'s' * (len(layers) > 1)} {number_ranges(layers)}"


def counted(targets: Sequence[Target]) -> str:
    """Return how many products of each component one forward can run, such as "4 linear, 2 FA"."""
    counts = Counter(target.component for target in run_together(targets))
    return ", ".join(f"{count} {component}" for component, count in counts.items())


def tensors_text(rule: Rule, targets: Iterable[Target]) -> str:
    """Return the tensors that the rule captures of the targets, with its slices."""
    names = dict.fromkeys(name for target in targets for name in rule.tensors_of(target))
    return ", ".join(f"{name} ({rule.slices[name].text})" if name in rule.slices else name for name in names)


def _moments(rule: Rule) -> str:
    steps, micro_batches, ranks = rule.when
    some = "" if micro_batches is None else f", micro-batches {micro_batches.text}"
    return steps.text + some + ("" if ranks is None else f", ranks {ranks.text}")


def rank_problems(rules: Iterable[Rule], world_size: int) -> list[str]:
    """Return a sentence for each rule that names a rank beyond the job's."""
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
    """Return a sentence about the matching rules that exclude this rank; "" if none does."""
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
