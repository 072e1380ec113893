"""`capd compare A B` and `--between`: compares the same records of two runs, quant types or ranks, one by one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capd.cli.compare.pairs_output import print_differences, say_left_out
from capd.cli.compare.request import CompareRequest, fields_of
from capd.cli.output import human_count, note
from capd.cli.progress import Progress
from capd.cli.sources import holds_files
from capd.cli.stores import attempt_of, is_run, resolve_run
from capd.errors import CapdError, ConfigError, DamagedRecord, NothingMatched
from capd.store.objects.address import RunPlace, place_of
from capd_client.protocol.key import Key

if TYPE_CHECKING:
    from capd.io.items import Skipped
    from capd.io.pairs import Matched
    from capd.io.sides import Entry, Side
    from capd.report.differences import Compared, Differences

__all__ = ["compare_pairs"]


def compare_pairs(
    request: CompareRequest,
    *,
    between: str | None,
    ignore: str | None,
    each: bool,
    first: bool,
    tolerance: float,
) -> int:
    """Match the records, compare the pairs, print the result and return the exit code."""
    fields = request.fields
    free = set(fields_of("--ignore", ignore)) if ignore else set()
    left, right, field = _sides(request, between)
    free |= {field} if field else set()
    from capd.report.differences import Differences

    found = Differences(left, right, fields, tolerance, keeps_each=each)
    (lefts, bad_lefts), (rights, bad_rights) = left.entries(), right.entries()
    scalars, bad_scalars = _scalars(request, left, right)
    found.unread += [*bad_lefts, *bad_rights, *bad_scalars]
    for problem in found.unread:
        note(f"skipped {problem.name}: {problem.reason}")
    _must_be_there(left, lefts)
    _must_be_there(right, rights)
    pairing = _matched(found, lefts, rights, free, choose=not field and not ignore)
    _compare(request, found, pairing, until_first=first)
    counts = (len(lefts), len(rights))
    print_differences(request, found, pairing, sorted(free), counts, scalars, stopped=first)
    say_left_out(found, pairing)
    return _code(found) if found.unread else 0


def _compare(request: CompareRequest, found: Differences, pairing: Matched, *, until_first: bool) -> None:
    from capd.report.differences import compare_each

    with (
        _compared(request, found, pairing) as compared,
        Progress(len(pairing.pairs), "pairs") as progress,
    ):
        for seen in compare_each(pairing, found, compared, until_first=until_first):
            if not isinstance(seen, int):
                progress.say(f"skipped {seen.name}: {seen.reason}")
            progress.add(seen if isinstance(seen, int) else 0)
    if found.whole.errors.records:
        return
    pairs = human_count(len(pairing.pairs))
    if found.unread:
        kind = DamagedRecord if _code(found) == 4 else CapdError
        raise kind(f"nothing to compare: none of {pairs} pairs could be read")
    reasons = "; ".join(dict.fromkeys(reason for _, reason in found.mismatched))
    raise NothingMatched(f"none of {pairs} pairs can be compared: {reasons}")


@contextlib.contextmanager
def _compared(request: CompareRequest, found: Differences, pairing: Matched) -> Iterator[Compared]:
    """Give what compares pairs: threads of this process, or the workers of a cluster."""
    from capd.report.differences import compared_here
    from capd.server.heap import settled_heap

    threads, cluster = request.source.threads, request.cluster
    if not cluster.is_used:
        with settled_heap():
            yield compared_here(found.left, found.right, threads)
        return
    cluster.refuse_checkpoint("a comparison of two captures")
    from capd.distributed.tasks.pairs import runs_of

    task_nbytes, runs = cluster.task_nbytes, runs_of(found.left, found.right, pairing.pairs)
    largest = max(pairing.pairs, key=lambda pair: pair.nbytes)
    with cluster.engine(threads, runs, (largest.nbytes, largest.left.name)) as engine:
        from capd.distributed.cluster.pairing import compared_on

        yield compared_on(engine, uuid.uuid4().hex, found.left, found.right, task_nbytes)


def _scalars(request: CompareRequest, left: Side, right: Side) -> tuple[list[dict[str, Any]], list[Skipped]]:
    """Return the differences of the scalars of two runs, and damaged ones; none within one run, or of tensor files."""
    if request.other is None or not (is_run(place_of(left.source)) and is_run(place_of(right.source))):
        return [], []
    from capd.report.scalars.scalar_differences import scalar_differences

    return scalar_differences(left.source, right.source)


def _code(found: Differences) -> int:
    return 4 if any(one.damaged for one in found.unread) else 1


def _must_be_there(side: Side, entries: Sequence[Entry]) -> None:
    if not entries:
        kept = (
            f": {human_count(side.without_elements)} records are statistics alone"
            if side.without_elements
            else ""
        )
        raise NothingMatched(f"no tensor in {side.source} matches the selection{kept}")


def _matched(
    found: Differences, lefts: Sequence[Entry], rights: Sequence[Entry], free: set[str], *, choose: bool
) -> Matched:
    """Return the pairs.

    If there is no pair and each side has one quant type, `choose` lets the matching ignore the quant type.

    Raises:
        NothingMatched: If there is no pair. The message names the fields in which the sides differ.
    """
    from capd.io.pairs import disjoint_fields, matched

    pairing = matched(lefts, rights, free)
    if pairing.pairs:
        return pairing
    apart = disjoint_fields(lefts, rights)
    types = apart.get("quant_type")
    if choose and types is not None and len(types[0]) == len(types[1]) == 1:
        note(f"the quant types differ, {types[0][0]} and {types[1][0]}: records are matched without them")
        free.add("quant_type")
        pairing = matched(lefts, rights, free)
        if pairing.pairs:
            return pairing
    apart = {name: values for name, values in apart.items() if name not in free}
    reasons = ", ".join(f"{name} ({_some(a)} against {_some(b)})" for name, (a, b) in apart.items())
    why = f"; they differ in {reasons}, and --ignore matches without these fields" if reasons else ""
    counts = f"{human_count(len(lefts))} and {human_count(len(rights))} records"
    raise NothingMatched(f"{found.left.source} and {found.right.source} share no record: {counts}{why}")


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join("none" if value in (None, "") else str(value) for value in values[:3])
    return shown + (", …" if len(values) > 3 else "")


def _sides(request: CompareRequest, between: str | None) -> tuple[Side, Side, str | None]:
    """Return both sides, and the field whose values distinguish them, if there is one."""
    if request.other is not None:
        if between is not None:
            raise ConfigError("--between compares two values within one STORE; leave OTHER out")
        return _side(request, request.place, []), _side(request, request.other, []), None
    field, words = _between(str(between))
    left, right = (_side(request, request.place, [_equals(field, word)], f"{field}={word}") for word in words)
    for side, word in ((left, words[0]), (right, words[1])):
        side.source = f"{side.source} ({field}={word})"
    return left, right, field


def _between(text: str) -> tuple[str, list[str]]:
    field, equals, values = text.partition("=")
    words = [word.strip() for word in values.split(",")]
    if not equals or len(words) != 2 or words[0] == words[1]:
        raise ConfigError(f"--between {text!r} is not FIELD=A,B with two values, as quant_type=bf16,mxfp8")
    if field not in Key.__struct_fields__:
        raise ConfigError(
            f"--between {field!r} is no field of a key; use one of {', '.join(Key.__struct_fields__)}"
        )
    return field, words


def _side(
    request: CompareRequest, place: RunPlace, tests: Sequence[Callable[[Any], bool]], value: str = ""
) -> Side:
    from capd.io.sides import file_side, run_side

    tests, attempt = [*request.source.keys.tests(), *tests], attempt_of(request.source.attempt)
    if isinstance(place, Path) and holds_files(place) and any(place.rglob("*.pt")):
        return file_side(place, tests, request.source.layer_base)
    run = _newest_with(place, tests) if value and not request.source.run and not is_run(place) else None
    if run is None:
        return run_side(resolve_run(place, request.source.run), tests, attempt)
    note(f"{value}: reading {run}")
    return run_side(run, tests, attempt)


def _newest_with(place: RunPlace, tests: Sequence[Callable[[Any], bool]]) -> RunPlace | None:
    """Return the newest run that has a series of the selection: each `capd run` writes a run of its own."""
    from capd.store.read.store import open_store, runs_at

    for run in reversed(runs_at(place)):
        if any(all(test(series.key) for test in tests) for series in open_store(run).series):
            return run
    return None


def _equals(field: str, word: str) -> Callable[[Any], bool]:
    if field not in ("rank", "layer"):
        return lambda key: bool(getattr(key, field) == word)
    if word == "none":
        return lambda key: getattr(key, field) is None
    if not word.isdecimal():
        raise ConfigError(f"--between: {field} cannot be {word!r}; give two numbers")
    number = int(word)
    return lambda key: bool(getattr(key, field) == number)
