"""The scalars of a run as tables and JSON: those that there are, and the values of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from capd.cli.output import human_count, json_number, note, print_json
from capd.cli.table import Column, aligned, print_columns
from capd.errors import DamagedRecord, NothingMatched

if TYPE_CHECKING:
    from capd.io.scalar_table import ReadableScalars
    from capd.store.read.scalars import Scalar
    from capd.store.read.store import Store

__all__ = ["list_scalars", "note_skipped", "show_scalar"]


def list_scalars(
    store: Store,
    tests: Sequence[Callable[[Any], bool]],
    limit: int | None,
    attempt: int | str,
    *,
    wide: bool,
    as_json: bool,
) -> int:
    """Print a row for each scalar of each rank, with its last value, and name those that cannot be read.

    Returns:
        The exit code.

    Raises:
        NothingMatched: The run has no scalar, or none is selected.
        DamagedRecord: No selected scalar can be read.
    """
    from capd.io.scalar_table import readable_scalars

    read = readable_scalars(store, tests, attempt)
    shown = read.found[:limit]
    if as_json:
        print_json([_summary(one) for one in shown])
    code = note_skipped(read)
    if not read.found:
        known = ", ".join(store.scalars())
        why = f"none of {known} matches" if known else "the job recorded none (capd_client.scalar)"
        raise NothingMatched(f"no scalar in {store.path}: {why}")
    if len(shown) < len(read.found):
        note(f"showing {len(shown)} of {len(read.found):,}; raise --limit for more")
    if not as_json:
        print_columns(_columns(shown), wide=wide)
    return code


def note_skipped(read: ReadableScalars) -> int:
    """Name the scalars that cannot be read on stderr.

    Returns:
        The exit code: 4 if there are any, otherwise 0.

    Raises:
        DamagedRecord: None can be read.
    """
    for one in read.skipped:
        note(f"skipped {one.name}: {one.reason}")
    if read.skipped and not read.found:
        raise DamagedRecord(f"none of {human_count(len(read.skipped), 'scalar')} could be read")
    return 4 if read.skipped else 0


def _summary(one: Scalar) -> dict[str, Any]:
    return {
        "name": one.name,
        "rank": one.rank,
        "records": len(one),
        "first_iteration": int(one.iterations[0]),
        "last_iteration": int(one.iterations[-1]),
        "last": json_number(float(one.values[-1])),
    }


def _columns(shown: Sequence[Scalar]) -> list[Column]:
    def whole(name: str, values: Sequence[Any]) -> Column:
        return Column(name, [str(value) for value in values], right=True)

    return [
        Column("scalar", [one.name for one in shown], is_name=True),
        whole("rank", [one.rank for one in shown]),
        whole("values", [human_count(len(one)) for one in shown]),
        whole("first iteration", [one.iterations[0] for one in shown]),
        whole("last iteration", [one.iterations[-1] for one in shown]),
        Column("last", aligned([float(one.values[-1]) for one in shown]), right=True),
    ]


def show_scalar(store: Store, name: str, limit: int, attempt: int | str, *, wide: bool, as_json: bool) -> int:
    """Print the last values of a scalar, with a column for each rank, and name the ranks that cannot be read.

    Returns:
        The exit code.

    Raises:
        DamagedRecord: No rank can be read.
    """
    from capd.io.scalar_table import readable_scalars

    read = readable_scalars(store, [lambda key: bool(key.tensor_name == name)], attempt)
    code = note_skipped(read)
    if as_json:
        print_json({"scalar": name, "ranks": [_document(one) for one in read.found]})
        return code
    by_rank = [dict(zip(_places(one), one.values.tolist(), strict=True)) for one in read.found]
    places = sorted({place for values in by_rank for place in values})
    shown = places[-limit:]
    columns = [
        Column(title, [str(place[at]) for place in shown], right=True, spare=spare)
        for at, (title, spare) in enumerate((("iteration", 0), ("micro", 0), ("call", 1)))
    ]
    for one, values in zip(read.found, by_rank, strict=True):
        cells = aligned([values.get(place) for place in shown])
        columns.append(Column(f"rank {one.rank}", cells, right=True, spare=2 if one.rank else 0))
    print_columns(columns, wide=wide)
    if len(shown) < len(places):
        note(f"the last {len(shown)} of {len(places):,} places; raise --limit for more")
    return code


def _places(one: Scalar) -> list[tuple[int, int, int, int]]:
    """Return the place of each value: iteration, micro-batch, call, and how many values before it have this place."""
    before: Counter[tuple[int, int, int]] = Counter()
    found = []
    for place in zip(one.iterations.tolist(), one.micro_batches.tolist(), one.calls.tolist(), strict=True):
        found.append((*place, before[place]))
        before[place] += 1
    return found


def _document(one: Scalar) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "iteration": one.iterations.tolist(),
        "micro_batch": one.micro_batches.tolist(),
        "call": one.calls.tolist(),
        "time_ns": one.times.view("int64").tolist(),
        "values": [json_number(value) for value in one.values.tolist()],
    }
