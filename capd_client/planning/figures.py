"""The arithmetic of a plan: from the document of each rank to records, bytes and times. No torch, no clock, no file.

All bytes are raw. A captured step is the planned iteration with the most bytes. Under mode sample:1/N, steps keep
different calls, so the numbers of a step are means over the selected steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import msgspec

from capd_client.planning.seen import Calls, RankSeen, SeriesSeen
from capd_client.protocol.selection import Ranges
from capd_client.protocol.statistics_row import ROW_NBYTES

__all__ = ["WINDOW", "rank_plan", "records_in"]

# The steps for rates, beginning with the first selected step.
WINDOW = 1000


def records_in(series: SeriesSeen, calls: Sequence[Calls], iteration: int, every: int) -> list[Calls]:
    """Return the calls that are kept if they are the calls of `iteration`.

    Args:
        series: The series of the calls.
        calls: The offers of one iteration.
        iteration: The iteration to assume.
        every: N of mode sample:1/N; 1 keeps all.
    """
    kept = [call for call in calls if (call.ordinal + iteration) % every == 0]
    if series.once and every > 1:
        return [Calls(call.ordinal, call.shape, call.nbytes, 1) for call in kept[:1]]
    return kept


def rank_plan(seen: RankSeen, *, ended: bool) -> dict[str, Any]:
    """Return the plan of one rank: `series`, each with its numbers, and the sums that `docs/json.md` lists.

    Args:
        seen: The document of the rank.
        ended: Whether the job ended by itself, so that its last iteration is complete as well.
    """
    complete = [i for i in seen.iterations if i.seconds is not None or ended]
    shown = complete or seen.iterations
    iterations = [i.iteration for i in shown]
    times = [i.seconds for i in seen.iterations if i.seconds is not None]
    step_s = statistics.median(times) if times else None
    fullest = max(iterations, key=lambda i: _nbytes_offered(seen, i), default=None)
    window = _window(seen)
    series = [
        _series_plan(seen, one, iterations, fullest, window)
        for one in seen.series
        if not one.besides or _steps_of(one, window)
    ]
    selected = sorted({one.steps for one in seen.series if one.steps is not None})
    sums = {
        name: sum(one[name] for one in series if not one["besides"])
        for name in ("records", "bytes", "link_bytes")
    }
    window_bytes = sum(one["bytes_per_1000_steps"] for one in series)
    finite = bool(series) and all(one["bytes_in_all"] is not None for one in series)
    return {
        "rank": seen.rank,
        "host": seen.host,
        "complete": bool(complete),
        "step_s": step_s,
        "iterations": [{**_iteration_plan(seen, i.iteration), "seconds": i.seconds} for i in shown],
        "first_iteration": _begin(seen),
        "steps": selected,
        "steps_per_1000": len(_selected_in(selected, window)),
        **sums,
        "bytes_per_1000_steps": window_bytes,
        "bytes_in_all": sum(one["bytes_in_all"] for one in series) if finite else None,
        "bytes_per_hour": _per_hour(window_bytes, step_s, finite=finite),
        "largest_bytes": max((call.nbytes for one in seen.series for call in _calls(one)), default=0),
        "link_bytes_per_s": seen.link_bytes_per_s,
        "link": seen.link_how,
        "link_s": sums["link_bytes"] / seen.link_bytes_per_s if seen.link_bytes_per_s else None,
        "arena_bytes": seen.arena_nbytes,
        "arena_steps": seen.arena_nbytes / sums["link_bytes"] if sums["link_bytes"] else None,
        "ring_bytes": seen.ring_nbytes,
        "policy": seen.policy,
        "max_step_bytes": seen.max_step_nbytes,
        "refused": seen.refused,
        "cut_short": seen.cut_short,
        "series": series,
    }  # fmt: skip


def _iteration_plan(seen: RankSeen, iteration: int) -> dict[str, Any]:
    """Return the records and bytes of this very iteration, if it is selected."""
    kept = [
        (one, call)
        for one in seen.series
        if not one.besides
        for call in records_in(one, one.iterations.get(iteration, ()), iteration, seen.sample_every)
    ]
    return {
        "iteration": iteration,
        "records": sum(call.count for _, call in kept),
        "bytes": sum(_kept_nbytes(one, call) for one, call in kept),
    }


def _series_plan(
    seen: RankSeen, one: SeriesSeen, iterations: list[int], fullest: Optional[int], window: range
) -> dict[str, Any]:
    pattern = one.iterations.get(fullest, []) if fullest is not None else []
    if not pattern:
        # The series is not in every step. The fullest step of the series is used.
        pattern = max(one.iterations.values(), key=lambda calls: sum(c.nbytes * c.count for c in calls))
    if one.steps is None:
        share = sum(i in one.iterations for i in iterations) / len(iterations) if iterations else 1.0
        steps: Sequence[int] = window
    else:
        share, steps = 1.0, _steps_of(one, window)
    records, nbytes, link_nbytes = _mean(seen, one, pattern, steps)
    shapes = [list(shape) for shape in sorted({call.shape for call in _calls(one)})]
    finite = one.steps is not None and not Ranges(one.steps).reaches(window.start + WINDOW)
    return {
        **msgspec.to_builtins(one.key),
        "dtype": one.dtype,
        "kept": "tensor" if one.payload else "statistics",
        "source": "capture" if one.steps is None else "watch",
        "steps": one.steps,
        "besides": one.besides,
        "shapes": shapes,
        "records": records,
        "bytes": nbytes,
        "link_bytes": link_nbytes,
        "bytes_per_1000_steps": round(nbytes * len(steps) * share),
        "bytes_in_all": round(nbytes * len(steps)) if finite else None,
        "iterations": {
            str(iteration): sum(c.count for c in records_in(one, calls, iteration, seen.sample_every))
            for iteration, calls in one.iterations.items()
        },
    }


def _mean(
    seen: RankSeen, one: SeriesSeen, pattern: Sequence[Calls], steps: Sequence[int]
) -> tuple[float, float, float]:
    """Return the records, the kept bytes and the bytes over the link, per captured step."""
    every = seen.sample_every
    chosen = steps[: every * (len(steps) // every)] or steps if every > 1 else steps[:1]
    kept = [call for step in chosen or (0,) for call in records_in(one, pattern, step, every)]
    number = len(chosen) or 1
    records = sum(call.count for call in kept)
    totals = (
        records,
        sum(_kept_nbytes(one, call) for call in kept),
        sum(_link_nbytes(one, call) for call in kept),
    )
    means = [total // number if total % number == 0 else total / number for total in totals]
    return means[0], means[1], means[2]


def _kept_nbytes(one: SeriesSeen, call: Calls) -> int:
    return call.count * (call.nbytes if one.payload else ROW_NBYTES)


def _link_nbytes(one: SeriesSeen, call: Calls) -> int:
    """Return the bytes over the link. A GPU computes statistics itself. For CPU tensors, the daemon does so."""
    return call.count * (call.nbytes if one.payload or one.device == "cpu" else ROW_NBYTES)


def _nbytes_offered(seen: RankSeen, iteration: int) -> int:
    return sum(_kept_nbytes(one, call) for one in seen.series for call in one.iterations.get(iteration, ()))


def _calls(one: SeriesSeen) -> Iterable[Calls]:
    return (call for calls in one.iterations.values() for call in calls)


def _window(seen: RankSeen) -> range:
    """Return WINDOW steps, beginning with the first step that any watch selects and that the job still reaches."""
    begin = _begin(seen)
    selections = {one.steps for one in seen.series if one.steps is not None}
    found = (Ranges(text).first_from(begin) for text in selections)
    first = min((step for step in found if step is not None), default=begin)
    return range(first, first + WINDOW)


def _begin(seen: RankSeen) -> int:
    """Return the first iteration of the job, which is not 0 if the job was resumed."""
    return min((i.iteration for i in seen.iterations), default=0)


def _selected_in(selections: Iterable[str], window: range) -> list[int]:
    ranges = [Ranges(text) for text in selections]
    return [step for step in window if any(step in one for one in ranges)]


def _steps_of(one: SeriesSeen, window: range) -> list[int]:
    besides = Ranges(one.besides)
    return [step for step in _selected_in([one.steps or ""], window) if step not in besides]


def _per_hour(window_nbytes: float, step_s: Optional[float], *, finite: bool) -> Optional[float]:
    """Return the bytes per hour. None if nothing is captured after the window, or no step was timed."""
    return None if finite or not step_s else window_nbytes * 3600 / (WINDOW * step_s)
