"""The places of records in a dump of msprobe: step and rank directories, nodes in capture order, their parents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from capd.exchange.msprobe.names import (
    NodePlace,
    default_place,
    file_name_of,
    is_plain_name,
    node_base,
    parsed_node,
)
from capd.store.quantised.dequantise import class_of, whole_name
from capd.store.read.series import Record, Series

__all__ = ["DumpTensor", "RankStep", "parents_of", "rank_steps"]

_NO_PARENT = "Module"
_MOST_POSITIONS = 4096
# The classes of products whose module's class was not captured.
_KINDS = {"linear": "Linear", "grouped_linear": "GroupedLinear", "FA": "Attention"}

Occurrence = tuple[Any, ...]


class DumpTensor(NamedTuple):
    """A record and where it goes: its node, its path in the entry of the node, the name of its file.

    Attributes:
        parts: The number of records in it: those of a quantised tensor that is written as a whole, otherwise 1.
    """

    series: Series
    number: int
    node: str
    path: tuple[str | int | None, ...]
    file_name: str
    parts: int = 1


class _Taken(NamedTuple):
    time_ns: int
    series: Series
    number: int
    base: str
    node: str
    place: NodePlace
    occurrence: Occurrence
    file_name: str


@dataclass
class RankStep:
    """The records of one rank in one iteration, in capture order, and the moments of the nodes.

    Attributes:
        crowded_out: The number of records whose places in dump.json have other records.
    """

    rank: int
    iteration: int
    tensors: list[DumpTensor] = field(default_factory=list)
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)
    found: list[_Taken] = field(default_factory=list)
    crowded_out: int = 0


def rank_steps(chosen: Sequence[Series], *, repeat_weights: bool) -> list[RankStep]:
    """Return the records of the chosen series by iteration and rank.

    The ordinal of a node counts the moments of its module (micro-batch, call, …) in the order of their captures. A
    backward has the ordinal of its forward.
    """
    steps: dict[tuple[int, int], RankStep] = {}
    for series in chosen:
        reading = series.fresh()
        for record in reading.records:
            place = record.iteration, series.key.rank
            step = steps.setdefault(place, RankStep(place[1], place[0]))
            step.found.append(_taken(reading, record))
    for _, step in sorted(steps.items()):
        _number(step, repeat_weights)
    return [step for _, step in sorted(steps.items())]


def _taken(series: Series, record: Record) -> _Taken:
    key, attributes = series.key, record.attributes
    base = node_base(key, str(attributes.get("class") or _KINDS.get(key.component, "Module")))
    place, node, file_name = None, "", ""
    said = record.metadata.get("msprobe")
    if isinstance(said, dict):
        node, path, file_name = said.get("node", ""), said.get("path"), said.get("file", "")
        if is_plain_name(node) and parsed_node(node) and (not file_name or is_plain_name(file_name)):
            place = _said_place(path)
    if place is None:
        node = file_name = ""
        name = key.tensor_name if class_of(attributes) is None else whole_name(key.tensor_name, attributes)
        place = default_place(key, name or key.tensor_name)
    occurrence = (
        record.attempt, record.micro_batch, record.call, record.sample_idx, record.batch_idx, record.sequence_idx,
        record.recompute and place.direction == "forward",
    )  # fmt: skip
    return _Taken(record.time_ns, series, record.index, base, node, place, occurrence, file_name)


def _said_place(path: Any) -> NodePlace | None:
    """Return the place that an imported record came from, if it is a possible one."""
    fit = isinstance(path, list) and 1 < len(path) <= 16 and isinstance(path[0], str)
    if not fit or not all(isinstance(one, str) or _is_position(one) for one in path):
        return None
    return NodePlace("", tuple(path), ".".join(map(str, path)))


def _is_position(one: Any) -> bool:
    return isinstance(one, int) and 0 <= one < _MOST_POSITIONS


def _number(step: RankStep, repeat_weights: bool) -> None:
    ordinals: dict[str, dict[Occurrence, int]] = {}
    found = sorted(step.found, key=lambda one: one.time_ns)
    step.found = []
    # By place, the index in step.tensors and the whole tensor there, None for a plain one.
    taken: dict[tuple[str, tuple[Any, ...]], tuple[int, Any]] = {}
    names: set[str] = set()
    for one in found:
        node = one.node
        if not node:
            known = ordinals.setdefault(one.base, {})
            node = f"{one.base}.{one.place.direction}.{known.setdefault(one.occurrence, len(known))}"
        whole, place = _whole(one), (node, one.place.path)
        if place in taken and one.place.path[-1] is not None:
            index, there = taken[place]
            # A further part of a quantised tensor belongs to the whole tensor that is there already.
            if whole is not None and whole == there:
                step.tensors[index] = step.tensors[index]._replace(parts=step.tensors[index].parts + 1)
            else:
                step.crowded_out += 1
            continue
        taken[place] = len(step.tensors), whole
        # Two entries of an imported dump may have named one file.
        file_name = one.file_name if one.file_name not in names else ""
        file_name = file_name or file_name_of(node, one.place.ending)
        names.add(file_name)
        step.tensors.append(DumpTensor(one.series, one.number, node, one.place.path, file_name))
        step.moments.setdefault(node, _moment(one.occurrence))
    if repeat_weights:
        _repeat(step, found, ordinals, set(taken))


def _whole(one: _Taken) -> tuple[str, str] | None:
    """Return quant type and class of the whole tensor of a part, None for a tensor that is no part."""
    kind = class_of(one.series.attributes)
    return None if kind is None else (one.series.key.quant_type, kind)


def _moment(occurrence: Occurrence) -> dict[str, Any]:
    names = ("attempt", "micro_batch", "call", "sample_idx", "batch_idx", "sequence_idx", "recompute")
    return {name: value for name, value in zip(names, occurrence, strict=True) if value is not None}


def _repeat(
    step: RankStep, found: list[_Taken], ordinals: dict[str, dict[Occurrence, int]], taken: set[Any]
) -> None:
    """Put each weight into all forward nodes of its module that have none."""
    for one in found:
        if one.node or one.place.path[0] != "parameters":
            continue
        for ordinal in ordinals[one.base].values():
            node = f"{one.base}.forward.{ordinal}"
            if node in step.moments and (node, one.place.path) not in taken:
                taken.add((node, one.place.path))
                file_name = file_name_of(node, one.place.ending)
                step.tensors.append(DumpTensor(one.series, one.number, node, one.place.path, file_name))


def parents_of(nodes: Iterable[str]) -> dict[str, str | None]:
    """Return construct.json: the parent of each forward and backward node, and of the parents, None for a root.

    A parent whose class is unknown is a node of class Module. A list of layers is no node, because it never runs.
    """
    captured: dict[tuple[str, str], dict[int, str]] = {}
    found: dict[str, str | None] = {}
    for name in nodes:
        parts = parsed_node(name)
        if parts is None or parts.direction == "parameters_grad":
            continue
        if parts.kind:
            captured.setdefault((parts.module, parts.direction), {})[parts.call] = name
        else:
            found[name] = None
    for (module, direction), calls in captured.items():
        for call, name in calls.items():
            _add_parents(name, module, direction, call, captured, found)
    return found


def _add_parents(
    node: str,
    module: str,
    direction: str,
    call: int,
    captured: dict[tuple[str, str], dict[int, str]],
    found: dict[str, str | None],
) -> None:
    child, calls = node, max(1, len(captured.get((module, direction), ())))
    while child not in found:
        module = _above(module)
        if not module:
            found[child] = None
            return
        known = captured.get((module, direction))
        if known:
            # A parent that runs less often than its child holds several of the child's calls.
            at = call if call in known else sorted(known)[min(call * len(known) // calls, len(known) - 1)]
            call, calls, parent = at, len(known), known[at]
        else:
            parent = f"Module.{module}.{_NO_PARENT}.{direction}.{call}"
        found[child] = parent
        child = parent


def _above(module: str) -> str:
    """Return the module that runs the given one: `layers.0` for `layers.0.fc1`, "" for `layers.0`."""
    parts = module.split(".")
    parts = parts[:-2] if parts[-1].isdigit() else parts[:-1]
    return ".".join(parts)
