"""The plain tensors inside a tensor subclass: a quantised weight's payload, scales and zero points.

torch's traceable wrappers list them in `__tensor_flatten__`, with the context that reassembles the subclass. Before
2.20, TransformerEngine's quantised tensors listed them in their own `get_metadata`. Each inner tensor is captured under
its own name, after the outer tensor's ("weight.qdata", "weight.scale", "weight.rowwise_data").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from capd_client.tensors.inspect import local_part

__all__ = ["context_of", "inner_tensors", "is_taken_apart"]

# A part of the 64 KiB that the attributes of a series may have.
_MAX_CONTEXT_CHARS = 16 << 10
# Classes that `inspect.unwrap` unwraps or refuses.
_TAKEN_WHOLE = ("DTensor", "AsyncCollectiveTensor", "FakeTensor", "FunctionalTensor")
# The transposes of TransformerEngine's Float8Tensor, since 2.20 and before.
_TRANSPOSES = ("transpose", "data_transpose")


def is_taken_apart(tensor: Tensor) -> bool:
    """Whether a tensor, or the local shard of a DTensor, is captured as the tensors inside it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    held: Any = local_part(tensor)
    known = type(held).__name__ in _TAKEN_WHOLE
    return not known and (is_traceable_wrapper_subclass(held) or _is_of_old_engine(held))


def inner_tensors(tensor: Tensor, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Return the name and value of each tensor inside `tensor`; nothing for a tensor that is captured whole."""
    held: Any = local_part(tensor)
    if not is_taken_apart(held):
        if name:
            yield name, held
    else:
        for inner, value in _direct(held):
            yield from inner_tensors(value, f"{name}.{inner}")


def _direct(held: Any) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors that a class lists, without a transpose that TransformerEngine has marked as invalid."""
    if _is_of_old_engine(held):
        listed = held.get_metadata().items()
    else:
        listed = ((inner.lstrip("_"), getattr(held, inner)) for inner in held.__tensor_flatten__()[0])
    for inner, value in listed:
        stale = inner in _TRANSPOSES and getattr(held, "_transpose_invalid", False)
        if isinstance(value, Tensor) and not stale:
            yield inner, value


def _is_of_old_engine(tensor: Any) -> bool:
    kind = type(tensor)
    named = kind.__module__.startswith("transformer_engine.") and hasattr(kind, "get_metadata")
    return named and not hasattr(kind, "__tensor_flatten__")


def context_of(tensor: Tensor) -> dict[str, Any]:
    """Return the facts that a reader needs besides the inner tensors.

    These are the class, the outer shape and dtype, the layout of each part, and the context.
    """
    tensor = local_part(tensor)
    kind: Any = type(tensor)
    if _is_of_old_engine(tensor):
        held: Any = tensor
        context: Any = {k: v for k, v in held.get_metadata().items() if not isinstance(v, Tensor)}
    else:
        _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a traceable wrapper has it
    return {
        "tensor_class": f"{kind.__module__}.{kind.__qualname__}",
        # A size of a ragged tensor is a name.
        "tensor_shape": tuple(size if type(size) is int else str(size) for size in tensor.shape),
        "tensor_dtype": str(tensor.dtype).removeprefix("torch."),
        "tensor_parts": {name: _layout(part) for name, part in _direct(tensor)},
        "tensor_context": _text(_with_transform(tensor, context))[:_MAX_CONTEXT_CHARS],
    }


def _with_transform(tensor: Any, context: Any) -> Any:
    """Add to the context whether TransformerEngine transformed its columnwise data, which only the quantiser knows."""
    transformed = getattr(getattr(tensor, "_quantizer", None), "with_rht", None)
    known = isinstance(transformed, bool) and isinstance(context, dict)
    return {**context, "with_rht": transformed} if known else context


def _layout(part: Tensor) -> list[list[int]]:
    """Return the shape and strides of a part, in elements; empty if they are no numbers, as for a ragged tensor."""
    if part.is_nested:
        return []
    return [[int(size) for size in part.shape], [int(step) for step in part.stride()]]


def _text(context: Any) -> str:
    try:
        return json.dumps(context, default=str)
    # JSON does not allow every kind of key.
    except (TypeError, ValueError, RecursionError):
        return repr(context)
