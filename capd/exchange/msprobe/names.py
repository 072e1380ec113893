"""The names in a dump of msprobe: nodes, places of tensors in a node, and files.

A node is `Module.<module>.<Class>.forward.<call>`, `….backward.<call>`, `….parameters_grad.<call>`, or a function as
`Functional.linear.5.forward`. Names become file names, so each name from outside must be a plain one.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from capd_client.protocol.key import Key

__all__ = ["Node", "NodePlace", "default_place", "file_name_of", "is_plain_name", "node_base", "parsed_node"]

MAX_NAME_CHARS = 240
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_UNFIT = re.compile(r"[^A-Za-z0-9_.\-]+")
_MOST_CHARS = 150
_MODULE = re.compile(r"Module\.(.+)\.([^.]+)\.(forward|backward|parameters_grad)\.(\d{1,9})")
_FUNCTION = re.compile(r"([A-Za-z]+\..+)\.(\d{1,9})\.(forward|backward)")
_POSITIONS = {"input": 0, "query": 0, "key": 1, "value": 2}


class Node(NamedTuple):
    """The parts of a node's name. `kind` is "" for a function; `direction` may be "parameters_grad"."""

    module: str
    kind: str
    direction: str
    call: int


class NodePlace(NamedTuple):
    """The place of a tensor: the direction of its node, the path in the entry, and the end of its file's name.

    A None at the end of the path is the next free position of the list.
    """

    direction: str
    path: tuple[str | int | None, ...]
    ending: str


def is_plain_name(name: object) -> bool:
    """Whether a name from outside can be a file's name in a dump: no path, nothing hidden, not too long."""
    return isinstance(name, str) and len(name) <= MAX_NAME_CHARS and bool(_PLAIN.fullmatch(name))


def file_name_of(node: str, ending: str) -> str:
    """Return the name of the file of a tensor: of its node, and of its place in it.

    One that is no plain name, or too long, gets a hash in its place.
    """
    name = f"{node}.{ending}.pt"
    if is_plain_name(name):
        return name
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{_UNFIT.sub('_', node)[:_MOST_CHARS].lstrip('.-')}.{digest}.pt"


def parsed_node(name: str) -> Node | None:
    """Return the parts of a node's name, None if it has no known form."""
    if found := _MODULE.fullmatch(name):
        module, kind, direction, call = found.groups()
        return Node(module, kind, direction, int(call))
    if found := _FUNCTION.fullmatch(name):
        function, call, direction = found.groups()
        return Node(function, "", direction, int(call))
    return None


def node_base(key: Key, kind: str) -> str:
    """Return `Module.<module>.<Class>` for a key, in characters that are fit for a file's name.

    A module that has none gets the words of its key. A name that had to be changed ends with a hash.
    """
    layer = "" if key.layer is None else str(key.layer)
    words = [key.stack, layer, key.layer_type, key.component]
    module = key.module or ".".join(word for word in words if word) or "capture"
    safe = _UNFIT.sub("_", module)[:_MOST_CHARS].strip(".")
    if safe != module:
        safe += "_" + hashlib.blake2b(module.encode(), digest_size=4).hexdigest()
    return f"Module.{safe}.{_UNFIT.sub('_', kind).replace('.', '_')[:60] or 'Module'}"


def default_place(key: Key, tensor_name: str) -> NodePlace:
    """Return the place of a captured tensor. dY is the input of a backward, and dX its output."""
    safe = _UNFIT.sub("_", tensor_name)[:60] or "tensor"
    if key.operation != "backward":
        if tensor_name in _POSITIONS:
            return NodePlace(
                "forward", ("input_args", _POSITIONS[tensor_name]), f"input.{_POSITIONS[tensor_name]}"
            )
        if tensor_name == "output":
            return NodePlace("forward", ("output", 0), "output.0")
        if tensor_name.partition(".")[0] in ("weight", "bias"):
            return NodePlace("forward", ("parameters", safe), f"parameters.{safe}")
        return NodePlace("forward", ("input_kwargs", safe), f"input.{safe}")
    of = tensor_name.removeprefix("grad_")
    if of == "output":
        return NodePlace("backward", ("input", 0), "input.0")
    if of in _POSITIONS:
        return NodePlace("backward", ("output", _POSITIONS[of]), f"output.{_POSITIONS[of]}")
    if of.partition(".")[0] in ("weight", "bias"):
        safe = safe.removeprefix("grad_")
        return NodePlace("parameters_grad", (safe, 0), safe)
    return NodePlace("backward", ("output", None), f"output.{safe}")
