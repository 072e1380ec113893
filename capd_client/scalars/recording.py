"""The recording of a scalar: its key, its moment and its value. No device is waited for."""

from __future__ import annotations

import numbers
from typing import Any, Optional, Union

import torch

from capd_client.errors import ConfigError
from capd_client.process.text import brief
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import MAX_NAME_CHARS, Key, Moment
from capd_client.protocol.scalars import scalar_key
from capd_client.session.starting import AnySession
from capd_client.steps.checkpointing import in_backward
from capd_client.steps.context import Context, as_index
from capd_client.tensors.inspect import PLAIN_TYPES, modes_active, unwrap, without_modes, without_single_value

__all__ = ["record", "recorded"]

# A gradient norm of each parameter of a large model fits. Each name is a series of the store.
_MAX_NAMES = 1 << 14
# By name and rank. Definitions and calls are counted by the identity of a key, so that no key is ever forgotten.
_keys: dict[tuple[str, int], Key] = {}


def record(
    current: AnySession,
    name: str,
    value: object,
    iteration: Optional[int] = None,
    micro_batch: Optional[int] = None,
) -> None:
    """Record one number now. An unusable one is a counted drop.

    Args:
        current: The session.
        name: The name of the scalar.
        value: A number or a tensor of one element.
        iteration: Replaces the current iteration.
        micro_batch: Replaces the current micro-batch.

    Raises:
        ConfigError: The name or an index is unusable.
    """
    number = _number(value)
    if isinstance(number, str):
        current.drop_invalid(f"scalar {brief(name)}: {number}", DropReason.UNSUPPORTED)
        return
    key = _key(name, current.context.bind())
    current.offer_scalar(number, key, _moment(current.context, key, iteration, micro_batch))


def recorded(context: Context, name: str) -> bool:
    """Return whether this iteration has a scalar of this name already."""
    return context.calls.has(id(_key(name, context.bind())), context.iteration)


def _key(name: str, rank: int) -> Key:
    found = _keys.get((name, rank)) if type(name) is str else None
    if found is not None:
        return found
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ConfigError(
            f"a scalar's name must be a str of 1 to {MAX_NAME_CHARS:,} characters, not {brief(name)}"
        )
    if len(_keys) >= _MAX_NAMES:
        raise ConfigError(
            f"more than {_MAX_NAMES:,} names of scalars in one process; a counter belongs in `iteration`, not in a name"
        )
    return _keys.setdefault((name, rank), scalar_key(str(name), rank))


def _moment(context: Context, key: Key, iteration: Optional[int], micro_batch: Optional[int]) -> Moment:
    if iteration is None:
        if context.dirty and not in_backward():
            context.begin_for_scalar(id(key))
        number = context.iteration
    else:
        number = as_index("iteration", iteration)
        context.reach(number)
    part = context.micro_batch if micro_batch is None else as_index("micro_batch", micro_batch)
    call = context.calls.next(id(key), number, part)
    return context.moment_at(number, part, call, context.sample_idx, context.batch_idx, context.sequence_idx)


def _number(value: Any) -> Union[float, torch.Tensor, str]:
    """Return the value as a float, as a device tensor of shape (), or say why it is neither."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    # `float()` also reads texts, and takes complex numbers of NumPy for real ones.
    is_number = _is_of_numpy(value) if hasattr(value, "dtype") else isinstance(value, numbers.Real)
    if not is_number:
        return f"a {type(value).__name__} is not one real number"
    try:
        return float(value.item() if hasattr(value, "dtype") else value)
    except (TypeError, ValueError, OverflowError) as error:
        return f"a {type(value).__name__} is not one real number: {error}"


def _is_of_numpy(value: Any) -> bool:
    """Return whether a value with a dtype is a number of NumPy, or an array of one."""
    return type(value).__module__ == "numpy" and value.dtype.kind in "biuf" and value.size == 1


def _of_tensor(value: torch.Tensor) -> Union[float, torch.Tensor, str]:
    tensor: Optional[torch.Tensor] = value
    if type(value) not in PLAIN_TYPES:
        if problem := without_single_value(value):
            return problem
        tensor, problem = unwrap(value)
        if tensor is None:
            return problem
    assert tensor is not None  # noqa: S101 - for the type checker
    if tensor.numel() != 1:
        return f"a tensor of shape {list(tensor.shape)} is not one number"
    if tensor.is_complex():
        return "a complex tensor is not one real number"
    if modes_active():
        with without_modes():
            return _plain(tensor)
    return _plain(tensor)


def _plain(tensor: torch.Tensor) -> Union[float, torch.Tensor, str]:
    if tensor.device.type != "cpu":
        return tensor.detach().reshape(())
    try:
        return float(tensor.item())
    except (RuntimeError, NotImplementedError) as error:
        # Inside a function transform no value exists.
        return str(error).partition("\n")[0]
