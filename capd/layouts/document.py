"""The JSON document of a comparison of two layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capd.layouts.divergence import Divergence
from capd.layouts.judging import Comparison, Judgement
from capd.layouts.whole_run import TensorName, WholeRun

__all__ = ["document_of", "tensors_of"]

_MOST_NAMES = 1000


def tensors_of(judgements: Sequence[Judgement]) -> list[dict[str, Any]]:
    """Return one row for each tensor, at the moment at which it is worst, worst first."""
    groups: dict[str, list[Judgement]] = {}
    for one in judgements:
        groups.setdefault(one.aspect.text, []).append(one)
    worst = [(max(group, key=lambda one: one.times_limit), group) for group in groups.values()]
    worst.sort(key=lambda pair: -pair[0].times_limit)
    return [
        {
            **_plain(one),
            "compared": len(group),
            "beyond": sum(each.is_beyond for each in group),
            "bit_equal": sum(each.is_bit_equal for each in group),
        }
        for one, group in worst
    ]


def document_of(
    comparison: Comparison,
    noise: Sequence[WholeRun],
    times: float,
    divergence: Divergence | None,
    *,
    stopped: bool,
) -> dict[str, Any]:
    """Return the document (docs/json.md).

    Args:
        comparison: The comparison.
        noise: The noise runs.
        times: The limit, in estimates.
        divergence: The first divergent tensor.
        stopped: Whether the comparison ended there.
    """
    judged, samples = comparison.judgements, comparison.samples
    return {
        "reference": _run(comparison.reference),
        "other": _run(comparison.other),
        "noise": [run.source for run in noise],
        "limit": times,
        "guessed_limits": comparison.limits.are_guesses,
        "up_to_scale": comparison.up_to_scale,
        "gradient_scale": comparison.gradient_scale,
        "samples": {
            "rule": samples.rule,
            "anchor": samples.anchor,
            "pairs": len(samples.pairs),
            "unpaired": samples.unpaired,
            "reference": samples.of_reference,
            "other": samples.of_other,
        },
        "other_dtypes": [
            {"reference": ours, "other": theirs, "comparisons": count}
            for (ours, theirs), count in comparison.other_dtypes.items()
        ],
        "cropped_words": comparison.cropped_words,
        "routed_tokens": comparison.routed,
        "rerouted_tokens": comparison.rerouted,
        "compared": len(judged),
        "bit_equal": sum(one.is_bit_equal for one in judged),
        "beyond": len(comparison.beyond),
        "complete": not stopped,
        "left_out": dict(comparison.left_out),
        "only_reference": _names(comparison.aspects.only_reference),
        "only_other": _names(comparison.aspects.only_other),
        "tensors": tensors_of(judged),
        "first_divergence": None if divergence is None else _first(divergence),
    }


def _run(run: WholeRun) -> dict[str, Any]:
    return {"source": run.source, "sizes": run.sizes, "dropout": run.dropout, "perturb": run.perturb}


def _names(names: Sequence[TensorName]) -> list[str]:
    return [str(name) for name in names[:_MOST_NAMES]]


def _plain(one: Judgement) -> dict[str, Any]:
    return {
        "tensor": one.aspect.text,
        "other_tensors": [str(name) for name in one.aspect.other.names],
        "iteration": one.at.iteration,
        "micro_batch": None if one.at.micro_batch < 0 else one.at.micro_batch,
        "call": one.at.call,
        "coordinates": dict(one.at.coordinates),
        "error": one.fit.error,
        "limit": one.limit,
        "estimate": one.estimate,
        "eps": one.eps,
        "times_limit": one.times_limit,
        "factor": one.fit.factor,
        "residual": one.fit.residual,
        "equals": list(one.equals),
        "spread": one.spread,
        "reason": one.reason,
    }


def _first(found: Divergence) -> dict[str, Any]:
    return {
        **_plain(found.judgement),
        "is_operand": found.is_operand,
        "inputs_agree": found.inputs_agree,
        "differing_inputs": list(found.inputs),
        "after": None if found.after is None else found.after.aspect.text,
        "text": found.text,
    }
