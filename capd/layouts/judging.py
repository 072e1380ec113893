"""Judges the whole tensors of a run by those of a reference: errors, limits, and best-fit factors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from capd.layouts.experts import joined_rows, matched_rows, rerouted_tokens
from capd.layouts.factor import Fit, explanations, fit
from capd.layouts.limits import Limits
from capd.layouts.roundings import roundoff
from capd.layouts.samples import SamplePairs, SamplePlace, sample_of
from capd.layouts.views import Aspect, Aspects, Values
from capd.layouts.vocabulary import common_words
from capd.layouts.whole_run import Occasion, WholeRun

__all__ = ["RESULTS", "Comparison", "Judgement", "Pairing", "judge", "tasks_of"]

_CLOSE = 1e-3
RESULTS = ("output", "grad_input", "grad_weight", "grad_bias", "grad_query", "grad_key", "grad_value")
"""The tensors that a product computes."""


class Pairing(NamedTuple):
    """One comparison at one moment: the occasions of both runs, which are added up if there are several."""

    aspect: Aspect
    reference: tuple[Occasion, ...]
    other: tuple[Occasion, ...]

    @property
    def at(self) -> Occasion:
        """The occasion in the reference."""
        return self.reference[0]


@dataclass(frozen=True)
class Judgement:
    """How one tensor of one moment compares.

    Attributes:
        aspect: What is compared.
        at: When, in the reference.
        fit: Error, factor and residual, after the factor that both layouts should have.
        limit, estimate, eps: As `capd.layouts.limits.Limit`.
        spread: The largest difference between replicas of either run.
        judged: The number that is judged: the error, or the residual after the factor.
        equals: The sizes of a layout that the factor equals.
        reason: Why it cannot be compared: shapes, or which run has NaN or Inf; "" if it was.
        is_bit_equal: Whether both hold the same numbers.
    """

    aspect: Aspect
    at: Occasion
    fit: Fit
    limit: float
    estimate: float
    eps: float
    spread: float
    judged: float
    equals: Sequence[str] = ()
    reason: str = ""
    is_bit_equal: bool = False

    @property
    def is_beyond(self) -> bool:
        """Whether rounding does not explain the difference."""
        return bool(self.reason) or not (self.judged <= self.limit and self.spread <= self.limit)

    @property
    def times_limit(self) -> float:
        """The judged number, in limits."""
        return math.inf if self.reason else max(self.judged, self.spread) / self.limit


@dataclass
class Comparison:
    """The result for two runs.

    Attributes:
        reference, other: The runs.
        samples: Which micro-batch is which.
        limits: The limits.
        aspects: What is compared with what.
        up_to_scale: Whether the residual is judged instead of the error.
        gradient_scale: The factor that gradients of the other run have by right.
        judgements: One for each comparison.
        left_out: What cannot be compared, by reason.
        cropped_words: The words that only one vocabulary has.
        routed, rerouted: Tokens of all routers, and those that went to other experts.
        other_dtypes: Comparisons of two dtypes, by that of the reference and that of the other run.
    """

    reference: WholeRun
    other: WholeRun
    samples: SamplePairs
    limits: Limits
    aspects: Aspects
    up_to_scale: bool = False
    gradient_scale: float = 1.0
    judgements: list[Judgement] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    cropped_words: int = 0
    rerouted: int = 0
    routed: int = 0
    other_dtypes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that may explain a factor: those of both layouts."""
        ours, theirs = self.reference.sizes, self.other.sizes
        found = {name: max(size, ours.get(name, 1)) for name, size in theirs.items()}
        return {**found, **{name: size for name, size in ours.items() if name not in found}}

    @property
    def beyond(self) -> list[Judgement]:
        """Those that rounding does not explain."""
        return [one for one in self.judgements if one.is_beyond]


def tasks_of(comparison: Comparison) -> list[Pairing]:
    """Return all comparisons in order of execution in the reference, and count what is left out.

    The order is that of iterations, then micro-batches, forward before backward, then the time at which the first
    tensor of a product was captured, operands before results. A weight may be captured after the output.
    """
    found: list[Pairing] = []
    for aspect in comparison.aspects.found:
        found += _of_aspect(comparison, aspect)
    begun: dict[tuple[str, str, Occasion], int] = {}
    for task in found:
        product, time = _product(task), comparison.reference.time(task.aspect.name, task.at)
        begun[product] = min(time, begun.get(product, time))

    def order(task: Pairing) -> tuple[int, int, tuple[tuple[str, int], ...], bool, int, bool, int]:
        at, name = task.at, task.aspect.name
        return (
            at.iteration, at.micro_batch, at.coordinates, name.operation != "forward", begun[_product(task)],
            name.tensor in RESULTS, comparison.reference.time(name, at),
        )  # fmt: skip

    return sorted(found, key=order)


def _product(task: Pairing) -> tuple[str, str, Occasion]:
    return task.aspect.name.module, task.aspect.name.operation, task.at


def _of_aspect(comparison: Comparison, aspect: Aspect) -> Iterator[Pairing]:
    ours = comparison.reference.occasions(aspect.reference.names[0])
    theirs = comparison.other.occasions(aspect.other.names[0])
    if aspect.name.is_of_step:
        yield from _of_step(aspect, ours, theirs)
        return
    by_sample: dict[tuple[SamplePlace, int], Occasion] = {(sample_of(at), at.call): at for at in theirs}
    pairs = comparison.samples.pairs
    if aspect.name.is_of_expert:
        yield from _of_expert(comparison, aspect, ours, theirs)
        return
    for at in ours:
        there = pairs.get(sample_of(at))
        match = None if there is None else by_sample.get((there, at.call))
        if match is None:
            comparison.left_out["tensors of samples that only one run has"] += 1
        else:
            yield Pairing(aspect, (at,), (match,))


def _of_step(aspect: Aspect, ours: Sequence[Occasion], theirs: Sequence[Occasion]) -> Iterator[Pairing]:
    """Pair the captures of a parameter, or of its whole gradient, by iteration: samples do not tell them apart."""
    there: dict[int, Occasion] = {}
    for at in sorted(theirs):
        there.setdefault(at.iteration, at)
    seen: set[int] = set()
    for at in sorted(ours):
        if at.iteration in there and at.iteration not in seen:
            seen.add(at.iteration)
            yield Pairing(aspect, (at,), (there[at.iteration],))


def _of_expert(
    comparison: Comparison, aspect: Aspect, ours: Sequence[Occasion], theirs: Sequence[Occasion]
) -> Iterator[Pairing]:
    """Pair the captures of an expert: all data parallel ranks' tokens of a micro-batch are one tensor with `ep`."""
    back: dict[tuple[int, int], list[SamplePlace]] = {}
    for sample, there in comparison.samples.pairs.items():
        back.setdefault((there.iteration, there.micro_batch), []).append(sample)
    for at in theirs:
        samples = sorted(back.get((at.iteration, at.micro_batch), []))
        wanted = [Occasion(one.iteration, one.micro_batch, at.call, one.coordinates) for one in samples]
        # An expert that got no token was not computed.
        held = tuple(one for one in wanted if one in ours)
        whole = all(not one.coordinates for one in samples) and not at.coordinates
        if whole and held:
            yield Pairing(aspect, held, (at,))
        else:
            comparison.left_out["rows of experts whose ranks hold other samples"] += 1


def judge(comparison: Comparison, tasks: Sequence[Pairing]) -> Iterator[Judgement]:
    """Compare everything, in order of execution; each judgement is also kept. `tasks`: as `tasks_of` returns them.

    Raises:
        MissingParts: A part of a tensor is missing. The message names its ranks.
        ContradictoryParts: Parts of a tensor do not fit together.
        CapdError: As `LogicalSeries.numpy`.
    """
    _count_rerouted(comparison, tasks)
    scale: float | None = None
    for task in tasks:
        name = task.aspect.name
        if scale is None and name.operation != "forward" and not name.is_of_step:
            scale = comparison.gradient_scale = _gradient_scale(comparison, task)
        one = _judged(comparison, task, scale or 1.0)
        if one is not None:
            comparison.judgements.append(one)
            yield one


def _read(comparison: Comparison, task: Pairing, scale: float = 1.0) -> tuple[Values, Values] | None:
    """Return the tensors of the reference and of the other run; None if rows of an expert cannot be paired.

    Gradients of the other run are divided by `scale`.
    """
    aspect, ours, theirs = task.aspect, comparison.reference, comparison.other
    found = aspect.other.values(theirs, task.other)
    # The gradient of the whole step is averaged over the ranks.
    if scale != 1.0 and aspect.name.operation != "forward" and not aspect.name.is_of_step:
        found = found / scale
    if not aspect.name.is_of_expert or aspect.name.is_of_parameter:
        return aspect.reference.values(ours, task.reference), found
    truth = joined_rows([aspect.reference.values(ours, [at]) for at in task.reference])
    rows = matched_rows(joined_rows([found]), truth)
    return None if rows is None else (truth, rows)


def _judged(comparison: Comparison, task: Pairing, scale: float) -> Judgement | None:
    read, name = _read(comparison, task, scale), task.aspect.name
    if read is None:
        comparison.left_out["rows of experts that got other tokens"] += 1
        return None
    truth, found = read
    ours = comparison.reference.series(name, task.at)
    theirs = comparison.other.series(task.aspect.other.names[0], task.other[0])
    eps = max(roundoff(ours.part_dtype), roundoff(theirs.part_dtype))
    if ours.part_dtype != theirs.part_dtype:
        comparison.other_dtypes[ours.part_dtype, theirs.part_dtype] += 1
    limit = comparison.limits.of(task.aspect, task.at.iteration, eps)
    spread = max(
        comparison.reference.spread(name, task.at),
        comparison.other.spread(task.aspect.other.names[0], task.other[0]),
    )
    if truth.shape != found.shape and (words := common_words(name, found, truth)) is not None:
        axis = next(axis for axis in range(truth.ndim) if truth.shape[axis] != found.shape[axis])
        comparison.cropped_words = max(comparison.cropped_words, abs(truth.shape[axis] - found.shape[axis]))
        found, truth = words
    if truth.shape != found.shape:
        reason = f"shape {list(truth.shape)} against {list(found.shape)}"
        return Judgement(
            task.aspect, task.at, Fit(math.inf, None, None), limit.value, limit.estimate, eps, spread, math.inf,
            reason=reason,
        )  # fmt: skip
    fitted, reason = fit(found, truth), ""
    if not math.isfinite(fitted.error) and (where := _not_finite(truth, found)):
        reason = f"NaN or Inf in {where}"
    judged = fitted.residual if comparison.up_to_scale and fitted.residual is not None else fitted.error
    return Judgement(
        task.aspect, task.at, fitted, limit.value, limit.estimate, eps, spread, judged,
        equals=_equals(comparison, fitted, limit.value), reason=reason,
        is_bit_equal=bool(np.array_equal(truth, found)),
    )  # fmt: skip


def _not_finite(truth: Values, found: Values) -> str:
    """Return which runs hold a NaN or Inf, "" if none does."""
    runs = (("the reference", truth), ("the other run", found))
    have = [name for name, values in runs if not np.isfinite(values).all()]
    return "both runs" if len(have) > 1 else "".join(have)


def _equals(comparison: Comparison, fitted: Fit, limit: float) -> list[str]:
    if fitted.factor is None or fitted.residual is None or fitted.residual > max(limit, _CLOSE):
        return []
    return explanations(fitted.factor, comparison.sizes)


def _gradient_scale(comparison: Comparison, task: Pairing) -> float:
    """Return the factor that gradients have by right: Megatron divides the loss by the micro-batches of a rank.

    With more data parallel ranks, or a smaller global batch, a rank has fewer micro-batches, so each gradient is larger
    by as much until the ranks are averaged. The factor is accepted if the first captured gradient has it.
    """
    ours, theirs = comparison.reference, comparison.other
    expected = ours.micro_batches / theirs.micro_batches
    if expected == 1.0:
        return 1.0
    read = _read(comparison, task)
    if read is None or read[0].shape != read[1].shape:
        return 1.0
    factor = fit(read[1], read[0]).factor
    return expected if factor is not None and abs(factor / expected - 1) < _CLOSE else 1.0


def _count_rerouted(comparison: Comparison, tasks: Sequence[Pairing]) -> None:
    """Count the tokens whose experts are others, by the logits of the routers."""
    rows: Counter[tuple[str, Occasion]] = Counter()
    for name in comparison.reference.names:
        if (
            name.is_of_expert
            and name.operation == "forward"
            and name.module.endswith("fc1")
            and name.tensor == "input"
        ):
            block = name.module.partition(".experts.")[0]
            for at in comparison.reference.occasions(name):
                rows[block, at._replace(call=0)] += len(comparison.reference.values(name, at))
    for task in tasks:
        name = task.aspect.name
        if name.operation != "forward" or name.tensor != "output" or not name.module.endswith(".router"):
            continue
        read = _read(comparison, task)
        if read is None or read[0].shape != read[1].shape:
            continue
        tokens = read[0].size // read[0].shape[-1]
        choices = round(rows[name.module.removesuffix(".router"), task.at._replace(call=0)] / tokens)
        if choices:
            comparison.routed += tokens
            comparison.rerouted += rerouted_tokens(read[1], read[0], choices)
