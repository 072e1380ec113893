"""`capd show --logical` and `capd export --logical`: whole tensors, put together from the parts of all ranks."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

from capd.cli.output import human_number, json_number, print_json, print_lines
from capd.cli.selection import KeyOptions, Tests
from capd.cli.store.histogram import value_bars, value_counts
from capd.cli.table import prose
from capd.errors import ConfigError, NothingMatched
from capd_client.process.text import printable

if TYPE_CHECKING:
    from capd.store.logical.series import LogicalSeries
    from capd.store.read.store import Store

__all__ = ["chosen_tensors", "find_tensor", "show_tensor"]

_LABEL = len("placements  ")
_NAMED = 4
_STATISTICS = ("count", "nan", "inf", "zero", "min", "max", "absmax", "mean", "std", "sum", "sum_sq")
_FORMATS = ("pt", "npz")


def find_tensor(store: Store, name: str, attempt: int | str) -> LogicalSeries:
    """Return the whole tensor with a name, or the only one whose name ends in it, or that it matches as a glob.

    The path of a series finds the tensor of which it holds parts.

    Raises:
        NothingMatched: None is found.
        ConfigError: Several are found. The message names some.
        ContradictoryParts: The attributes of a series are not sound.
    """
    everything = store.logical(attempt=attempt)
    wanted = name.strip("/")
    found = [one for one in everything if one.name == wanted]
    found = found or [one for one in everything if wanted in (part.path for part in one.parts)]
    found = found or [one for one in everything if one.name.endswith(f".{wanted}")]
    found = found or [one for one in everything if fnmatchcase(one.name, wanted)]
    if not found:
        raise NothingMatched(
            f"no whole tensor {name!r} in {store.path}; `capd ls {store.path}` lists the series"
        )
    if len(found) > 1:
        some = ", ".join(one.name for one in found[:_NAMED])
        raise ConfigError(f"{name!r} matches {len(found)} whole tensors ({some}, …); give more of the name")
    return found[0]


def show_tensor(
    one: LogicalSeries, number: int | None, limit: int, first: int, *, wide: bool, as_json: bool
) -> None:
    """Print a whole tensor with its moments, or what it is at one of them.

    Raises:
        NothingMatched: It has no such moment.
        MissingParts: At the moment, a part is missing.
    """
    if number is None:
        if as_json:
            print_json({**_head(one), "records": [_record(one, n) for n in range(len(one))]})
        else:
            lines = [*_lines(one), "", *(_moment_line(one, n) for n in range(min(limit, len(one))))]
            print_lines(prose(map(printable, lines), _LABEL, wide=wide))
        return
    if not -len(one) <= number < len(one):
        raise NothingMatched(f"{one.name} has no record #{number}: it has {len(one)}")
    _show_record(one, number, first, wide=wide, as_json=as_json)


def _show_record(one: LogicalSeries, number: int, first: int, *, wide: bool, as_json: bool) -> None:
    from capd.store.format.dtypes import to_values
    from capd.store.format.statistics import public, summarise

    bits, spread = one.numpy(number), one.spread_at(number)
    stats, flat = public(summarise(bits, one.dtype)), to_values(bits, one.dtype).reshape(-1)
    values = {name: getattr(stats, name) for name in _STATISTICS}
    if as_json:
        edges, counts = value_counts(flat)
        print_json(
            {
                **_head(one),
                **_record(one, number),
                "spread": json_number(spread),
                "stats": {name: json_number(value) for name, value in values.items()},
                "values": [json_number(value) for value in flat[:first].tolist()],
                "value_histogram": {"edges": edges, "counts": counts},
            }
        )
        return
    shown = ", ".join(human_number(value) for value in flat[:first].tolist())
    lines = [
        *_lines(one),
        f"record      {_moment_line(one, number)}",
        f"spread      {human_number(spread)} between replicas",
        *(f"{name:<11} {human_number(value)}" for name, value in values.items()),
        f"values      {shown}{', …' if flat.size > first else ''}",
    ]
    print_lines([*prose(map(printable, lines), _LABEL, wide=wide), "", "values", *value_bars(flat)])


def _head(one: LogicalSeries) -> dict[str, Any]:
    from capd.io.whole_tensors import described_whole

    return {**msgspec.structs.asdict(one.key), "kept": one.kept, **described_whole(one)}


def _record(one: LogicalSeries, number: int) -> dict[str, Any]:
    moment = one.moments[number]
    missing = [{"place": part.place, "ranks": list(part.ranks)} for part in one.missing_at(moment)]
    return {
        "index": number % len(one),
        **msgspec.structs.asdict(moment),
        "shape": None if missing else list(one.shape(moment)),
        "missing": missing,
    }


def _lines(one: LogicalSeries) -> list[str]:
    key = msgspec.structs.asdict(one.key)
    known = ", ".join(
        f"{name} {value}" for name, value in key.items() if value not in ("", None) and name != "rank"
    )
    ranks = ", ".join(f"{part.rank}" for part in one.parts)
    added = f", {one.attributes['sum']}" if "sum" in one.attributes else ""
    return [
        f"tensor      {one.name}",
        f"key         {known}",
        f"dtype       {one.dtype}{added}",
        f"placements  {one.placements}",
        f"parts       of ranks {ranks}",
        f"records     {len(one)}",
    ]


def _moment_line(one: LogicalSeries, number: int) -> str:
    moment, missing = one.moments[number], one.missing_at(number)
    when = ", ".join(
        f"{name} {value}"
        for name in ("iteration", "micro_batch", "call", "attempt")
        if (value := getattr(moment, name)) or name == "iteration"
    )
    what = (
        f"missing: {'; '.join(map(str, missing))}"
        if missing
        else "×".join(map(str, one.shape(moment))) or "scalar"
    )
    return f"#{number % len(one)}  {when}  {what}"


def chosen_tensors(
    store: Store, tests: Tests, keys: KeyOptions, attempt: int | str, to: str
) -> tuple[list[LogicalSeries], list[LogicalSeries]]:
    """Return the selected whole tensors that keep their elements, with all their parts, and those that do not.

    Raises:
        ConfigError: The format has no whole tensors.
        NothingMatched: Nothing is selected.
        MissingParts: A part of any of them is missing. Nothing is exported then.
        ContradictoryParts: Parts do not fit together.
    """
    if to not in _FORMATS:
        raise ConfigError(f"--logical writes {' or '.join(_FORMATS)}, not {to}")
    found = [one for one in store.logical(attempt=attempt) if _is_wanted(one, tests)]
    if not found:
        raise keys.nothing_in(str(store.path), (series.key for series in store.series))
    chosen = [one for one in found if one.kept == "tensor"]
    if not chosen:
        raise NothingMatched(f"only tensors whose statistics alone were kept match in {store.path}")
    for one in chosen:
        for moment in one.moments:
            one.shape(moment)
    return chosen, [one for one in found if one.kept != "tensor"]


def _is_wanted(one: LogicalSeries, tests: Tests) -> bool:
    """Whether the tensor is selected by its own key, or by that of any part."""
    keys = (one.key, *(series.key for series in one.series))
    return any(all(test(key) for test in tests) for key in keys)
