"""The plain tensors inside a tensor subclass: a quantised weight's payload, scales and zero points.

Classes that torch calls traceable wrappers tell them by `__tensor_flatten__`, with the context that puts them together
again. They are captured as they are, each under its own name behind the tensor's ("weight.qdata", "weight.scale").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from capd_client.tensors import local_part

__all__ = ["context_of", "inner_tensors"]

_MAX_CONTEXT_CHARS = 16 << 10  # of the 64 KiB that the attributes of a series may have
_TAKEN_WHOLE = ("DTensor", "AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor")  # see `tensors.unwrap`


def inner_tensors(tensor: Tensor, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The name and value of each tensor inside `tensor`; nothing for one that is captured as it stands."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    held: Any = local_part(tensor)
    if type(held).__name__ in _TAKEN_WHOLE or not is_traceable_wrapper_subclass(held):
        if name:
            yield name, held
        return
    names, _ = held.__tensor_flatten__()
    for inner in names:
        yield from inner_tensors(getattr(held, inner), f"{name}.{inner}")


def context_of(tensor: Tensor) -> dict[str, Any]:
    """What a reader needs besides the inner tensors: class, shape and dtype shown to the outside, and the context."""
    tensor = local_part(tensor)
    kind: Any = type(tensor)
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a traceable wrapper has it
    return {
        "tensor_class": f"{kind.__module__}.{kind.__qualname__}",
        "tensor_shape": tuple(
            size if type(size) is int else str(size) for size in tensor.shape
        ),  # ragged: a name
        "tensor_dtype": str(tensor.dtype).removeprefix("torch."),
        "tensor_context": _text(context)[:_MAX_CONTEXT_CHARS],
    }


def _text(context: Any) -> str:
    try:
        return json.dumps(context, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not have
        return repr(context)
