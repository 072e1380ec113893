"""The tensors of one entry of dump.json, and the record that each becomes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from capd.exchange.msprobe.dumps import Dump
from capd.exchange.msprobe.names import Node, parsed_node
from capd.pt_files.dictionary import Capture
from capd.pt_files.pickle_scan import BadTensorFile
from capd.strict_json import strict_json
from capd_client.protocol.key import MAX_NAME_CHARS, Key, Moment
from capd_client.protocol.messages import MAX_METADATA_NBYTES

__all__ = ["STATISTICS_TYPE", "capture_of_entry", "tensors_of"]

STATISTICS_TYPE = "msprobe_statistics"
"""The quant_type of entries that have numbers and no tensor."""
_MAX_DEPTH = 12
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d{1,9})(?:\.|$)")
_QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "scaled_dot_product_attention": ("query", "key", "value"),
}
_NUMBERS = ("dtype", "shape", "Max", "Min", "Mean", "Norm", "md5", "requires_grad")

Path = tuple[str | int, ...]


def tensors_of(entry: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path and the description of each tensor in an entry. Other values are passed over.

    Raises:
        BadTensorFile: The entry is nested too deep, or is no map.
    """
    if not isinstance(entry, dict):
        raise BadTensorFile("its entry is no map")
    yield from _tensors(entry, ())


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if len(path) > _MAX_DEPTH:
        raise BadTensorFile(f"its entry is nested deeper than {_MAX_DEPTH}")
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str):
            if path and "shape" in value and "dtype" in value:
                yield path, value
            return
        for name, inner in value.items():
            yield from _tensors(inner, (*path, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _tensors(inner, (*path, place))


def capture_of_entry(
    dump: Dump, node: str, path: Path, told: dict[str, Any], order: int, dtype: str | None
) -> Capture:
    """Return the record of a tensor, all parts except its elements.

    Args:
        dump: The rank and the step.
        node: The name of the entry.
        path: The place of the tensor in the entry.
        told: What dump.json says of the tensor.
        order: The number of the tensor in dump.json: msprobe writes entries in the order of their calls.
        dtype: The dtype of the elements; None if there are only numbers.

    Raises:
        BadTensorFile: The entry does not name a record.
    """
    parts = parsed_node(node)
    if parts is None:
        raise BadTensorFile(f"{node[:80]!r} is no name of a module's or function's call")
    try:
        ".".join((node, *map(str, path))).encode()
    except UnicodeEncodeError:
        raise BadTensorFile("its name has half of a character, which no text can keep") from None
    if len(parts.module) > MAX_NAME_CHARS or max((len(str(one)) for one in path), default=0) > 200:
        raise BadTensorFile("its name is too long")
    said: dict[str, Any] = {"node": node, "path": list(path), "recompute": "unknown"}
    if dump.process is not None:
        said["process"] = dump.process
    if dtype is None:
        said["statistics"] = strict_json(
            {name: told[name] for name in _NUMBERS if name in told} | {"type": "torch.Tensor"}
        )
    else:
        said |= {
            name: str(told[to])[:MAX_NAME_CHARS]
            for name, to in (("file", "data_name"), ("md5", "md5"))
            if to in told
        }
    metadata = json.dumps({"msprobe": said})
    if len(metadata) > MAX_METADATA_NBYTES:
        raise BadTensorFile(f"its names and numbers take more than {MAX_METADATA_NBYTES} bytes")
    moment = Moment(iteration=dump.iteration, call=parts.call, time_ns=dump.time_ns + order)
    attributes = {"class": parts.kind[:200]} if parts.kind else {}
    needs_grad = told.get("requires_grad") is True
    return Capture(_key(dump, parts, path, dtype), moment, "cpu", needs_grad, False, metadata, attributes)


def _key(dump: Dump, parts: Node, path: Path, dtype: str | None) -> Key:
    layer = _LAYER.search(parts.module)
    function = parts.module.rpartition(".")[2] if not parts.kind else ""
    is_linear = "Linear" in parts.kind or function == "linear"
    is_result = path[0] == "output" or parts.direction == "parameters_grad"
    return Key(
        quant_type=STATISTICS_TYPE if dtype is None else _QUANT_TYPES.get(dtype, dtype),
        rank=dump.rank,
        tensor_name=_tensor_name(parts, function, path),
        layer=int(layer[1]) if layer else None,
        phase="post" if is_result else "pre",
        layer_type="linear" if is_linear else "",
        operation="forward" if parts.direction == "forward" else "backward",
        component="linear" if is_linear else "",
        module=parts.module,
    )


def _tensor_name(parts: Node, function: str, path: Path) -> str:
    """Return capd's name of a tensor. The inputs of a backward are dY, its outputs dX, in the order of the operands."""
    section, rest = path[0], path[1:]
    operands = _OPERANDS.get(function, ("input",))
    if parts.direction == "parameters_grad":
        # The list of each parameter has one gradient.
        return ".".join(["grad_" + str(section), *(str(one) for one in rest if one != 0)])
    if section == "parameters":
        return ".".join(map(str, rest))
    backward = parts.direction == "backward"
    is_operand = section in ("input_args", "input_kwargs", "input") if not backward else section == "output"
    if is_operand and len(rest) == 1 and isinstance(rest[0], int) and rest[0] < len(operands):
        name = operands[rest[0]]
    else:
        first = "input" if is_operand else "output"
        name = ".".join([first, *map(str, rest)]) if rest != (0,) else first
    return f"grad_{name}" if backward else name
