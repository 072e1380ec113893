"""The output of `capd compare A B --logical`: JSON, CSV, or a table with the worst tensors first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capd.cli.compare.request import CompareRequest, name_some
from capd.cli.output import human_count, note, print_lines
from capd.cli.table import Column, print_columns, prose
from capd_client.process.text import human_value

if TYPE_CHECKING:
    from capd.layouts.divergence import Divergence
    from capd.layouts.judging import Comparison
    from capd.layouts.whole_run import WholeRun

__all__ = ["print_comparison"]

_SHOWN = 20
_CLOSE = 1e-3
_CSV = (
    "tensor", "iteration", "micro_batch", "call", "error", "limit", "estimate", "eps", "times_limit", "factor",
    "residual", "spread", "compared", "beyond", "bit_equal", "reason",
)  # fmt: skip


def print_comparison(
    request: CompareRequest,
    comparison: Comparison,
    noise: Sequence[WholeRun],
    times: float,
    divergence: Divergence | None,
    *,
    stopped: bool,
) -> None:
    """Print the comparison, and name on stderr what was left out.

    Args:
        request: The options.
        comparison: The comparison.
        noise: The noise runs.
        times: The limit in estimates.
        divergence: The first divergent tensor.
        stopped: Whether the comparison ended there.
    """
    from capd.layouts.document import document_of

    whole = not (stopped and divergence is not None)
    document = document_of(comparison, noise, times, divergence, stopped=not whole)
    rows: list[dict[str, Any]] = document["tensors"]
    if not request.print(document, _CSV, [[row[name] for name in _CSV] for row in rows]):
        if whole:
            _print_rows(rows[:_SHOWN], wide=request.wide)
            more = len(rows) - _SHOWN
            print_lines(
                [f"… and {human_count(more)} more; --csv and --json have all", ""] if more > 0 else [""]
            )
        print_lines(prose(_summary(document, len(rows)), 2, wide=request.wide))
    _say(comparison, document)


def _print_rows(rows: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    columns = [
        Column("tensor", [row["tensor"] for row in rows], is_name=True),
        Column("error", [f"{row['error']:.2e}" for row in rows], right=True),
        Column("limit", [f"{row['limit']:.2e}" for row in rows], right=True, spare=1),
        Column("of limit", [f"{row['times_limit']:.2f}" for row in rows], right=True),
        Column("beyond", [f"{row['beyond']} of {row['compared']}" for row in rows], right=True, spare=2),
        Column("iteration", [str(row["iteration"]) for row in rows], right=True, spare=3),
        Column("factor", [_factor(row) for row in rows]),
    ]
    print_columns(columns, wide=wide, colours=["red" if row["beyond"] else "" for row in rows])


def _factor(row: Mapping[str, Any]) -> str:
    """Return the factor as text, such as "× 2.000 (residual 0.3 eps): equals tp_size"; "" for 1."""
    if row["reason"]:
        return str(row["reason"])
    texts = []
    if row["spread"] > row["limit"]:
        texts.append(f"replicas differ by {row['spread']:.2g}")
    factor = row["factor"]
    if factor is not None and row["beyond"] and abs(factor - 1) > _CLOSE:
        residual = "" if row["residual"] is None else f" (residual {row['residual'] / row['eps']:.3g} eps)"
        equals = f": equals {', '.join(row['equals'])}" if row["equals"] else ""
        texts.append(f"× {factor:.3f}{residual}{equals}")
    return "; ".join(texts)


def _summary(document: Mapping[str, Any], tensors: int) -> list[str]:
    samples = document["samples"]
    by = f"by {samples['rule']}" + (f" of {samples['anchor']}" if samples["anchor"] else "")
    lines = [
        f"{human_count(tensors, 'tensor')}, {human_count(document['compared'])} comparisons: "
        f"{human_count(document['beyond'])} beyond the limit, {human_count(document['bit_equal'])} bit-equal; "
        f"{_batches(samples)} paired {by}"
    ]
    if document["guessed_limits"]:
        lines.append(
            f"limits are a guess, {document['limit']:g} times the roundings of the products until then; "
            "--noise measures them"
        )
    else:
        lines.append(
            f"limits: {document['limit']:g} times the largest error of "
            f"{human_count(len(document['noise']), 'noise run')}, at least 2 eps"
        )
    if document["gradient_scale"] != 1:
        lines.append(
            f"gradients of the other run are {document['gradient_scale']:g} times as large, by its micro-batches on "
            "each rank; they are compared without this factor"
        )
    lines += [
        f"{human_count(one['comparisons'], 'comparison')} of {one['reference']} with {one['other']}: limits are those "
        "of the coarser one"
        for one in document["other_dtypes"]
    ]
    if document["cropped_words"]:
        lines.append(f"{human_count(document['cropped_words'], 'padded word')} of one vocabulary cropped")
    if document["routed_tokens"]:
        routed = human_count(document["routed_tokens"])
        lines.append(f"{human_count(document['rerouted_tokens'])} of {routed} tokens routed differently")
    if (first := document["first_divergence"]) is not None:
        at = f"iteration {first['iteration']}, micro-batch {first['micro_batch']}"
        lines.append(f"first divergence: {at}: {first['text']}")
        factor = _factor({**first, "beyond": 1})
        over = f"error {first['error']:.3g}, limit {first['limit']:.3g}"
        lines.append(f"  {over}{f', {factor}' if factor else ''}")
    return lines


def _batches(samples: Mapping[str, Any]) -> str:
    """Return how many micro-batches are pairs, and of how many if some are not."""
    count = samples["pairs"]
    text = human_count(count, "micro-batch") if count == 1 else f"{human_count(count)} micro-batches"
    if samples["unpaired"]:
        text += f" of {human_count(samples['reference'])} and {human_count(samples['other'])}"
    return text


def _say(comparison: Comparison, document: Mapping[str, Any]) -> None:
    """Name on stderr what makes runs incomparable, and what was left out."""
    if max(comparison.reference.dropout, comparison.other.dropout) > 0:
        note(
            "the job has dropout, which ranks draw differently in each layout: differences are no errors; "
            "train without dropout to compare"
        )
    for run in (comparison.reference, comparison.other):
        if run.perturb is not None:
            note(f"{run.source} was captured with --perturb {human_value(run.perturb)}: its input differs")
    for reason, count in comparison.left_out.items():
        note(f"left out: {human_count(count)} {reason}")
    for run, names in (
        (comparison.reference, comparison.aspects.only_reference),
        (comparison.other, comparison.aspects.only_other),
    ):
        if names:
            name_some("tensor", f"only in {run.source}", [str(name) for name in names])
    samples = comparison.samples
    for run, count in ((comparison.reference, samples.of_reference), (comparison.other, samples.of_other)):
        if count > len(samples.pairs):
            note(
                f"left out: {human_count(count - len(samples.pairs))} of {human_count(count)} micro-batches of "
                f"{run.source}, which the other run does not have"
            )
