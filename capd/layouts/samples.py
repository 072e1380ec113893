"""Which micro-batch of one run is which of another: by content, or by the formula of a sampler."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from capd.errors import ConfigError
from capd.layouts.factor import relative_error
from capd.layouts.views import Aspect, Cut, Values
from capd.layouts.whole_run import Coordinates, Occasion, WholeRun

__all__ = ["RULES", "SamplePairs", "SamplePlace", "paired_samples"]

RULES = ("content", "megatron", "interleaved")
"""The rules of `--samples`."""

# Tensors of other samples are further apart than this; the norm of their difference is about √2 of one.
_SAME = 0.5
# Of each tensor, by which the nearest sample is found: 64 KiB.
_MOST_SOME = 1 << 13


class SamplePlace(NamedTuple):
    """The samples of one micro-batch on one data parallel rank."""

    iteration: int
    micro_batch: int
    coordinates: Coordinates


class SamplePairs(NamedTuple):
    """The pairs of samples.

    Attributes:
        pairs: By the sample of the reference.
        rule: How they were found: one of `RULES`, or "nearest".
        anchor: The tensor whose content was compared; "" by a formula.
        of_reference, of_other: The samples of each run.
        note: Why the rule is not the one that was asked for, "" if it is.
    """

    pairs: Mapping[SamplePlace, SamplePlace]
    rule: str
    anchor: str
    of_reference: int
    of_other: int
    note: str = ""

    @property
    def unpaired(self) -> int:
        """The samples of either run without a counterpart."""
        return self.of_reference + self.of_other - 2 * len(self.pairs)


def sample_of(at: Occasion) -> SamplePlace:
    """Return the sample of an occasion."""
    return SamplePlace(at.iteration, at.micro_batch, at.coordinates)


def paired_samples(
    reference: WholeRun, other: WholeRun, aspects: Sequence[Aspect], rule: str = "content"
) -> SamplePairs:
    """Pair the samples of two runs.

    "content" takes the first tensor of the forward pass that both runs captured, `input_ids` if there is one. Samples
    of one iteration with the same SHA-256 of its numbers are a pair. Samples without the same numbers are a pair if
    each is the other's nearest by some 8,192 of these, and nearer than half of their norm. If no sample has a
    counterpart, the formula of Megatron's sequential sampler is used: micro-batch m of data parallel rank r of n is
    sample m · n + r of the step (`MegatronPretrainingSampler`). "interleaved" is torch's `DistributedSampler`: its
    sample i · n + r is the same where a micro-batch has one row.

    One tensor is in memory at a time, and some 64 KiB of each sample.

    Raises:
        ConfigError: The rule is unknown, or cannot be used with these micro-batches; or all micro-batches of one run
            have other shapes than those of the other.
    """
    if rule not in RULES:
        raise ConfigError(f"--samples {rule!r:.80}: use one of {', '.join(RULES)}")
    anchor = _anchor(reference, aspects)
    ours, theirs = _side(reference, anchor.reference), _side(other, anchor.other)
    if rule != "content":
        if rule == "interleaved":
            _check_rows(ours, theirs)
        return _by_formula(ours, theirs, rule)
    found = _by_content(ours, theirs, anchor.text)
    if found.pairs:
        return found
    _check_shapes(ours, theirs, anchor.text)
    told = "no micro-batches of both runs have the same content; they are paired by Megatron's formula"
    return _by_formula(ours, theirs, "megatron")._replace(note=f"{told} (compared: {anchor.text})")


def _anchor(reference: WholeRun, aspects: Sequence[Aspect]) -> Aspect:
    """Return the first activation of the forward pass in order of execution, `input_ids` before all."""
    inputs = [
        one
        for one in aspects
        if one.name.operation == "forward" and not one.name.is_of_parameter and not one.name.is_of_expert
    ]
    if not inputs:
        raise ConfigError(
            "no activation of the forward pass is in both runs, so samples cannot be paired; capture `input`"
        )

    def first(one: Aspect) -> tuple[bool, int]:
        times = [reference.time(one.name, at) for at in reference.occasions(one.name)]
        return one.name.tensor != "input_ids", min(times)

    return min(inputs, key=first)


class _Side(NamedTuple):
    """A run, the tensor by which its samples are told apart, and where each sample has it."""

    run: WholeRun
    cut: Cut
    samples: Mapping[SamplePlace, Occasion]

    def values(self, sample: SamplePlace) -> Values:
        """Return the tensor of a sample."""
        return self.cut.values(self.run, [self.samples[sample]])


def _side(run: WholeRun, cut: Cut) -> _Side:
    found: dict[SamplePlace, Occasion] = {}
    for at in sorted(run.occasions(cut.names[0])):
        found.setdefault(sample_of(at), at)
    return _Side(run, cut, found)


def _by_content(ours: _Side, theirs: _Side, anchor: str) -> SamplePairs:
    left, right = (
        {sample: _content(side.values(sample)) for sample in side.samples} for side in (ours, theirs)
    )
    pairs: dict[SamplePlace, SamplePlace] = {}
    by_digest: dict[tuple[int, bytes], list[SamplePlace]] = {}
    for sample, content in right.items():
        by_digest.setdefault((sample.iteration, content.digest), []).append(sample)
    for sample, content in left.items():
        same = by_digest.get((sample.iteration, content.digest))
        if same:
            pairs[sample] = same.pop(0)
    exact, taken = len(pairs), set(pairs.values())
    rest = _by_iteration(sample for sample in left if sample not in pairs)
    free = _by_iteration(sample for sample in right if sample not in taken)
    for iteration, samples in rest.items():
        others = free.get(iteration, [])
        nearest = {sample: _nearest(left[sample], right, others) for sample in samples}
        back = {sample: _nearest(right[sample], left, samples) for sample in others}
        pairs |= {sample: one for sample, one in nearest.items() if one is not None and back[one] == sample}
    rule = "content" if exact == len(pairs) else "nearest"
    return SamplePairs(pairs, rule, anchor, len(left), len(right))


class _Content(NamedTuple):
    """The digest and the shape of a sample's tensor, and some of its numbers: the tensors would not all fit."""

    digest: bytes
    shape: tuple[int, ...]
    some: Values


def _content(values: Values) -> _Content:
    # Both runs may keep the same numbers in other types. -0.0 and 0.0 are the same number.
    plain = np.ascontiguousarray(values, dtype=np.float64) + 0.0
    digest = hashlib.sha256(repr(values.shape).encode())
    digest.update(plain.reshape(-1).data)
    # An odd step visits all channels, whose number is even.
    step = (plain.size // _MOST_SOME) | 1
    return _Content(digest.digest(), values.shape, plain.reshape(-1)[::step].copy())


def _by_iteration(samples: Iterable[SamplePlace]) -> dict[int, list[SamplePlace]]:
    found: dict[int, list[SamplePlace]] = {}
    for sample in samples:
        found.setdefault(sample.iteration, []).append(sample)
    return found


def _nearest(
    content: _Content, others: Mapping[SamplePlace, _Content], free: Sequence[SamplePlace]
) -> SamplePlace | None:
    distances = [
        (relative_error(others[one].some, content.some), one)
        for one in free
        if others[one].shape == content.shape
    ]
    error, found = min(distances, default=(_SAME, None))
    return found if error < _SAME else None


def _by_formula(ours: _Side, theirs: _Side, rule: str) -> SamplePairs:
    left, right = _numbered(ours.samples), _numbered(theirs.samples)
    pairs = {sample: right[at] for at, sample in left.items() if at in right}
    return SamplePairs(pairs, rule, "", len(left), len(right))


def _numbered(samples: Collection[SamplePlace]) -> dict[tuple[int, int], SamplePlace]:
    ranks = sorted({sample.coordinates for sample in samples})
    return {
        (one.iteration, max(one.micro_batch, 0) * len(ranks) + ranks.index(one.coordinates)): one
        for one in samples
    }


def _check_shapes(ours: _Side, theirs: _Side, anchor: str) -> None:
    """Refuse runs none of whose micro-batches has the shape of one of the other run."""
    left, right = ({side.values(sample).shape for sample in side.samples} for side in (ours, theirs))
    if left.isdisjoint(right):
        raise ConfigError(
            f"micro-batches have other shapes: {anchor} is {list(min(left))} in {_count(ours)}, and "
            f"{list(min(right))} in {_count(theirs)}; rows are not regrouped: run both with micro-batches of one size"
        )


def _count(side: _Side) -> str:
    number = len(side.samples)
    return f"{'1 micro-batch' if number == 1 else f'{number} micro-batches'} of {side.run.source}"


def _check_rows(ours: _Side, theirs: _Side) -> None:
    ranks, others = ({sample.coordinates for sample in side.samples} for side in (ours, theirs))
    if len(ranks) == len(others):
        return
    for side in (ours, theirs):
        shape = side.values(next(iter(side.samples))).shape
        if len(shape) >= 3 and 1 not in shape[:2]:
            raise ConfigError(
                f"--samples interleaved: a micro-batch of {side.run.source} has several rows ({list(shape)}), and the "
                "runs have other numbers of data parallel ranks, so a micro-batch of one has rows of several of the "
                "other; use micro-batches of one row"
            )
