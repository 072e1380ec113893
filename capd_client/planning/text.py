"""The text of a plan: series grouped over layers, equal ranks together, then sums, disk and warnings. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

from capd_client.process.text import human_count, human_nbytes, number_ranges, table_lines

__all__ = ["expected_lines", "plan_lines"]

# A part of a module's name that is a number.
_LAYER = re.compile(r"(?<=\.)\d+(?![^.])")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?![^.])")
_SHORT_S = 120.0
# The ratio is from docs/measurements.md.
_RATIO = " (bf16 is stored at about 1 : 1.4)"
_RIGHT = ("series", "records", "bytes", "step", "link", "arena holds")

Plan = Mapping[str, Any]
Draw = Callable[[Sequence[str], Sequence[Sequence[str]], Iterable[str]], Sequence[str]]
"""Draws a table from its header, its rows, and the names of the columns that are aligned to the right."""


def plan_lines(plan: Plan, *, every_series: bool = False, draw: Draw = table_lines) -> Iterator[str]:
    """Yield the lines of a plan.

    Args:
        plan: The JSON of a plan (`docs/json.md`).
        every_series: Whether every series has its own line, instead of one line per group.
        draw: Draws the tables.
    """
    yield from _tables(plan["ranks"], every_series, draw)
    yield ""
    yield from draw(
        ("rank", "host", "series", "records", "bytes", "step", "link", "arena holds"),
        [_rank_row(rank) for rank in plan["ranks"]],
        _RIGHT,
    )
    yield "(records and bytes of one captured step, raw; link: the time that its bytes take)"
    yield ""
    for node in plan["nodes"]:
        yield from _node_lines(node, plan)
    for warning in plan["warnings"]:
        yield f"warning: {warning}"


def expected_lines(expected: Sequence[Plan]) -> Iterator[str]:
    """Yield the lines about series that are known before a step has run."""
    rows = [
        row[:5] for row in _rows([{**one, "records": 0, "bytes": 0} for one in expected], every_series=False)
    ]
    yield f"{len(expected)} series would be captured"
    if rows:
        yield from table_lines(("module", "tensor", "series", "dtype", "shape"), rows, _RIGHT)
        yield "(dtypes as the parameters are now, autocast changes them; run a training step for shapes and bytes)"


def _tables(ranks: Sequence[Plan], every_series: bool, draw: Draw) -> Iterator[str]:
    """Yield one table for all ranks with equal tables."""
    tables: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for rank in ranks:
        tables.setdefault(_rows(rank["series"], every_series), []).append(rank["rank"])
    for number, (rows, alike) in enumerate(tables.items()):
        each = ", each" if len(alike) > 1 else ""
        yield from ([""] if number else [])
        yield f"one captured step of rank{'s' if each else ''} {number_ranges(alike)}{each}:"
        if not rows:
            yield "nothing"
            continue
        header = ("module", "tensor", "series", "dtype", "shape", "records", "bytes", "steps")
        columns = len(header) if len({row[-1] for row in rows}) > 1 else len(header) - 1
        yield from draw(header[:columns], [row[:columns] for row in rows], _RIGHT)


def _rows(series: Sequence[Plan], every_series: bool) -> tuple[tuple[str, ...], ...]:
    """Return the rows of a table. The rows of a module are together, in the order of their first series."""
    groups: dict[str, dict[tuple[str, ...], list[Plan]]] = {}
    for one in series:
        name = one["module"] or one["component"] or one["layer_type"] or "-"
        pattern = name if every_series else _pattern(name, one)
        ndim = len((one["shapes"] or [[]])[0])
        at = (one["operation"], one["tensor_name"], one["dtype"], one["kept"], str(one["steps"]), str(ndim))
        groups.setdefault(pattern, {}).setdefault(at, []).append(one)
    return tuple(_row(pattern, alike) for pattern, found in groups.items() for alike in found.values())


def _pattern(name: str, one: Plan) -> str:
    """Return the name that all layers and experts share. Other numbers, as in nn.Sequential, stay."""
    if one["layer"] is not None:
        behind = len(one["stack"]) if name.startswith(one["stack"]) else 0
        name = name[:behind] + _LAYER.sub("*", name[behind:], count=1)
    return _EXPERT.sub("*", name)


def _row(pattern: str, alike: Sequence[Plan]) -> tuple[str, ...]:
    first = alike[0]
    shapes = [shape for one in alike for shape in one["shapes"]]
    records, nbytes = (sum(one[name] for one in alike) for name in ("records", "bytes"))
    return (
        first["module"] or pattern if len(alike) == 1 else pattern,
        first["tensor_name"] + ("" if first["kept"] == "tensor" else " (statistics)"),
        human_count(len(alike)), first["dtype"], _shape(shapes), _count(records), human_nbytes(nbytes),
        "capture()" if first["steps"] is None else first["steps"],
    )  # fmt: skip


def _shape(shapes: Sequence[Sequence[Any]]) -> str:
    """Return one shape, with the smallest and the largest size of each axis that varies."""
    axes = zip(*shapes, strict=True)
    return "[" + ", ".join(_axis(list(dict.fromkeys(axis))) for axis in axes) + "]"


def _axis(sizes: list[Any]) -> str:
    if len(sizes) == 1:
        return str(sizes[0])
    return f"{min(sizes)}-{max(sizes)}" if all(isinstance(size, int) for size in sizes) else "…"


def _rank_row(rank: Plan) -> tuple[str, ...]:
    arena = "-" if rank["arena_steps"] is None else f"{_steps(rank['arena_steps'])} steps"
    if rank["arena_steps"] is not None and rank["step_s"]:
        arena += f" ({_seconds(rank['arena_steps'] * rank['step_s'])})"
    return (
        str(rank["rank"]), rank["host"], human_count(len(rank["series"])), _count(rank["records"]),
        human_nbytes(rank["bytes"]), _seconds(rank["step_s"]), _seconds(rank["link_s"]), arena,
    )  # fmt: skip


def _node_lines(node: Plan, plan: Plan) -> Iterator[str]:
    ranks = [rank for rank in plan["ranks"] if rank["host"] == node["host"]]
    first = ranks[0]
    selected = (
        ", ".join(f'"{text}"' for text in dict.fromkeys(text for rank in ranks for text in rank["steps"]))
        or "none"
    )
    most = human_count(max(rank["steps_per_1000"] for rank in ranks))
    of = "of 1,000" if node["bytes_in_all"] is None else "in all"
    yield f"{node['host']}: {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, steps {selected}: {most} {of}"
    if node["bytes_in_all"] is not None:
        yield f"  disk       {human_nbytes(node['bytes_in_all'])} in all, raw{_RATIO}"
    else:
        per_hour = node["bytes_per_hour"]
        rate = "" if per_hour is None else f", {human_nbytes(per_hour)} per hour"
        yield f"  disk       {human_nbytes(node['bytes_per_1000_steps'])} in 1,000 steps{rate}, raw{_RATIO}"
    yield from _disk_lines(node)
    if (window := node["window"]) is not None:
        needs = f"{human_count(window['iterations'])} x {human_nbytes(window['step_bytes'])}"
        holds = "hold" if window["fits"] else "do not hold"
        yield (
            f"  window     {needs} = {human_nbytes(window['bytes'])}, raw, which the "
            f"{human_nbytes(window['limit_bytes'])} of [window] bytes {holds}"
        )
    speed = "unknown" if not first["link_bytes_per_s"] else f"{human_nbytes(first['link_bytes_per_s'])}/s"
    yield f"  link       {speed} per rank ({first['link'] or 'not measured'})"
    ring = "" if first["ring_bytes"] is None else f", device ring {human_nbytes(first['ring_bytes'])}"
    threads = (
        f"; {node['encode_threads']} encode thread(s) in the daemon" if node.get("encode_threads") else ""
    )
    yield f"  memory     arena {human_nbytes(first['arena_bytes'])}{ring} per rank{threads}"
    arenas, daemon = node["arena_bytes"], node.get("daemon_bytes")
    own = "" if daemon is None else f", and {human_nbytes(daemon)} to the daemon's"
    yield (
        f"  containers add {human_nbytes(arenas)} ({len(ranks)} x {human_nbytes(first['arena_bytes'])}) to the memory "
        f"limit of the ranks{own}"
    )


def _disk_lines(node: Plan) -> Iterator[str]:
    disk = node["disk"]
    if disk is None:
        return
    limits = f"max_disk {human_nbytes(disk['max_disk'])}, keep_free {human_nbytes(disk['keep_free'])}"
    if disk.get("run_max") is not None:
        limits += f", run_max {human_nbytes(disk['run_max'])}"
    hours = node["hours_until_full"]
    until = "" if hours is None else f": full after {_hours(hours)}"
    speed = disk.get("write_bytes_per_s")
    writes = "" if speed is None else f"; writes {human_nbytes(speed)}/s (64 MiB, measured)"
    yield f"  room       {human_nbytes(node['room_bytes'])} in {disk['store']} ({limits}){until}{writes}"


def _count(number: float) -> str:
    return human_count(number) if isinstance(number, int) else f"{number:.1f}"


def _steps(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(seconds: Optional[float]) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.3g} s"
        if seconds < _SHORT_S
        else _hours(seconds / 3600)
    )


def _hours(hours: float) -> str:
    return (
        f"{hours * 60:.3g} min" if hours < 2 else f"{hours:.3g} h" if hours < 48 else f"{hours / 24:.3g} days"
    )
