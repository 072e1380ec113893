"""`capd compare A B --logical`: whole tensors of two layouts, judged by what rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from capd.cli.compare.logical_output import print_comparison
from capd.cli.compare.request import CompareRequest
from capd.cli.completion import any_of, store_paths
from capd.cli.options import flag, option
from capd.cli.output import note
from capd.cli.stores import attempt_of, resolve_run
from capd.errors import ConfigError, NothingMatched
from capd.store.objects.address import RunPlace, place_of

if TYPE_CHECKING:
    from capd.layouts.divergence import Divergence
    from capd.layouts.judging import Comparison
    from capd.layouts.whole_run import WholeRun

__all__ = ["LogicalOptions", "compare_logical"]

_LIMIT = 4.0
_LARGEST_LIMIT = 1e6


@dataclass(frozen=True, kw_only=True)
class LogicalOptions:
    """The options of `capd compare A B --logical`."""

    logical: Annotated[
        bool, flag("--logical", "Compare whole tensors of two layouts, with limits from rounding.")
    ] = False
    map: Annotated[
        str | None,
        option(
            "--map",
            "MAP",
            "--logical: names of another framework: megatron-hf, megatron-torchtitan or FILE.toml.",
            autocompletion=any_of("megatron-hf", "megatron-torchtitan"),
        ),
    ] = None
    noise: Annotated[
        list[str] | None,
        option(
            "--noise",
            "RUN",
            "--logical: a run like STORE with --perturb, to measure limits. May be given several times.",
            show_default=False,
            autocompletion=store_paths,
        ),
    ] = None
    limit: Annotated[
        str | None,
        option("--limit", "Nx", "--logical: the limit of a tensor, in estimates of rounding [default: 4x]."),
    ] = None
    samples: Annotated[
        str | None,
        option(
            "--samples",
            "RULE",
            "--logical: pair micro-batches by content, megatron or interleaved [default: content].",
            autocompletion=any_of("content", "megatron", "interleaved"),
        ),
    ] = None
    up_to_scale: Annotated[
        bool, flag("--up-to-scale", "--logical: judge what is left after each tensor's best-fit factor.")
    ] = False

    def given(self) -> dict[str, object]:
        """Return the options that mean nothing without --logical."""
        return {
            "--map": self.map, "--noise": self.noise, "--limit": self.limit, "--samples": self.samples,
            "--up-to-scale": self.up_to_scale,
        }  # fmt: skip

    @property
    def times(self) -> float:
        """The limit in estimates. Raises ConfigError for what is none."""
        if self.limit is None:
            return _LIMIT
        try:
            number = float(self.limit.removesuffix("x"))
        except ValueError:
            number = math.nan
        if not 0 < number <= _LARGEST_LIMIT:
            raise ConfigError(f"--limit {self.limit!r:.80}: write a number of estimates above 0, as 4x")
        return number


def compare_logical(request: CompareRequest, options: LogicalOptions, *, first: bool) -> int:
    """Compare two runs, print the result and return the exit code: 1 if a tensor is beyond its limit.

    Raises:
        ConfigError: An option, or the map, cannot be used.
        MissingParts: A part of a tensor is missing. The message names its ranks.
        ContradictoryParts: Parts of a tensor do not fit together.
        NothingMatched: The runs share no tensor.
    """
    if request.other is None:
        raise ConfigError("--logical compares two runs: capd compare A B --logical")
    times = options.times
    from capd.layouts.judging import Comparison
    from capd.layouts.limits import Limits
    from capd.layouts.names import load_map
    from capd.layouts.samples import paired_samples
    from capd.layouts.views import aspects_of

    names = None if options.map is None else load_map(options.map)
    reference, other = _run(request, request.place, request.source.run), _run(request, request.other)
    noise = [_run(request, place_of(place)) for place in options.noise or ()]
    for run in noise:
        _check_noise(run, reference, other)
    aspects = aspects_of(reference, other, names)
    if not aspects.found:
        mapped = "" if names is not None else "; --map has the names of another framework"
        raise NothingMatched(
            f"{reference.source} and {other.source} share no tensor: {aspects.only_reference[0]} against "
            f"{aspects.only_other[0]}{mapped}"
        )
    samples = paired_samples(reference, other, aspects.found, options.samples or "content")
    if samples.note:
        note(samples.note)
    ranks = max(reference.summing_ranks, other.summing_ranks)
    limits = Limits(reference, noise, times, ranks)
    comparison = Comparison(reference, other, samples, limits, aspects, up_to_scale=options.up_to_scale)
    divergence = _compare(comparison, until_first=first)
    if not comparison.judgements:
        raise NothingMatched(
            f"no tensor of {reference.source} has a counterpart at the same moment in {other.source}"
        )
    for run in noise:
        if run.perturb is None:
            note(
                f"--noise {run.source} was captured without --perturb: limits are as small as its differences"
            )
    print_comparison(request, comparison, noise, times, divergence, stopped=first)
    return 1 if comparison.beyond else 0


def _check_noise(run: WholeRun, reference: WholeRun, other: WholeRun) -> None:
    """Refuse a noise run that is one of the compared runs."""
    for which, known in (("the reference", reference), ("the run that is compared", other)):
        if Path(run.source).resolve() == Path(known.source).resolve():
            raise ConfigError(
                f"--noise {run.source} is {which}, so it measures no rounding; give a run like the reference with "
                "`capd run --perturb EPS`"
            )


def _compare(comparison: Comparison, *, until_first: bool) -> Divergence | None:
    """Judge all tensors, or those until the first divergence. Return it."""
    from capd.cli.progress import Progress
    from capd.layouts.divergence import first_divergence
    from capd.layouts.judging import judge, tasks_of

    tasks = tasks_of(comparison)
    with Progress(len(tasks), "tensors") as progress:
        for one in judge(comparison, tasks):
            progress.add(1)
            if until_first and one.is_beyond:
                found = first_divergence(comparison.judgements)
                if found is not None and found.inputs_agree:
                    return found
    return first_divergence(comparison.judgements)


def _run(request: CompareRequest, place: RunPlace, run: str | None = None) -> WholeRun:
    from capd.layouts.whole_run import WholeRun
    from capd.store.read.store import open_store

    source = request.source
    return WholeRun(open_store(resolve_run(place, run)), source.keys.tests(), attempt_of(source.attempt))
