"""The scalars that frameworks know: losses, gradient norms and learning rates, recorded without a call of the job.

`capd_client.integrations.counters.frameworks` says where these functions are called. None of them waits for a device.
"""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Optional

import torch

from capd_client.device.cuda.runtime import is_capturing
from capd_client.process.dynamo import untraced
from capd_client.process.log import RateLimitedLog
from capd_client.process.signals import is_interruption
from capd_client.scalars.recording import record, recorded
from capd_client.session.current import running
from capd_client.steps.trial_runs import trying
from capd_client.tensors.inspect import PLAIN_TYPES, modes_active, without_modes

__all__ = [
    "clipped", "clipped_by_fsdp", "computes_norm", "lightning", "megatron_losses", "megatron_step", "trainer",
]  # fmt: skip

# What a Trainer logs about its speed, and not about the model.
_SPEED = ("epoch", "total_flos", "num_input_tokens_seen", "_runtime", "_per_second")
_notices = RateLimitedLog()


@untraced
def _note(
    name: str, value: Any, number_of: Optional[Callable[[Any], Any]] = None, *, again: bool = True
) -> None:
    """Record a scalar, if it is one number and a session runs. Never raises an error of capd.

    Args:
        name: The name.
        value: Anything.
        number_of: Returns the number of the value, where it is not the value itself.
        again: Whether to record it although this iteration has a scalar of this name.
    """
    current = running()
    if current is None or trying():
        return
    try:
        number = value if number_of is None else _computed(number_of, value)
        if _is_number(number) and (again or not recorded(current.context, name)):
            record(current, name, number)
    except Exception as error:
        if is_interruption(error):
            raise
        _notices.warn("scalar", "the scalar %r of the framework is not recorded: %r", name, error)


def _computed(number_of: Callable[[Any], Any], value: Any) -> Any:
    """Return `number_of(value)`, computed unseen by the job: by autograd, its modes, and its CUDA graphs."""
    if torch.cuda.is_initialized() and is_capturing():  # type: ignore[no-untyped-call]  # torch's own lack
        return None
    with torch.no_grad(), without_modes() if modes_active() else nullcontext():
        return number_of(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # A DTensor would need a collective.
        return type(value) in PLAIN_TYPES and value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)


def trainer(_handler: Any, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
    """Record the numbers that a Trainer of transformers logs. They belong to the step that ended last.

    A number that was recorded in this iteration is not recorded again: the gradient norm was seen when it was clipped.
    """
    for name, value in logs.items() if isinstance(logs, Mapping) else ():
        if isinstance(name, str) and not name.endswith(_SPEED):
            _note(name, value, again=False)


def lightning(result: Any, loop: Any, *_: Any, **__: Any) -> None:
    """Record the loss that a `training_step` returned to Lightning, as "loss"."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        # Lightning divides the loss of every micro-batch by their number, and rounds it to its dtype.
        _note("loss", loss, lambda loss: loss.to(torch.float64) * loop.trainer.accumulate_grad_batches)


def megatron_losses(found: Any) -> None:
    """Record the losses of a micro-batch, by the names that Megatron's loss function gives them."""
    for name, value in found.items() if isinstance(found, Mapping) else ():
        if isinstance(name, str):
            _note(name, value, _mean if _is_pair(value) else None)


def _is_pair(value: Any) -> bool:
    """Return whether a loss is given as its sum and its number of tokens."""
    if isinstance(value, torch.Tensor):
        return type(value) in PLAIN_TYPES and value.shape == (2,)
    return isinstance(value, (list, tuple)) and len(value) == 2


def _mean(pair: Any) -> Any:
    return pair[0] / pair[1]


class _Norms(threading.local):
    """The calls of this thread that compute a gradient norm. The outermost one returns the norm of all gradients."""

    under_way = 0


_norms = _Norms()


@contextmanager
def computes_norm(*_: Any, **__: Any) -> Iterator[None]:
    """Note that the call computes a gradient norm, perhaps by calls that compute further ones."""
    _norms.under_way += 1
    try:
        yield
    finally:
        _norms.under_way -= 1


def _note_norm(norm: Any) -> None:
    if _norms.under_way == 1:
        _note("grad_norm", norm)


def megatron_step(result: Any, *_: Any, **__: Any) -> None:
    """Record the gradient norm that a step of Megatron's optimizer returns. It is 0.0 if none was computed."""
    norm = result[1] if isinstance(result, tuple) and len(result) == 3 else None
    if isinstance(norm, torch.Tensor) or norm:
        _note_norm(norm)


def clipped(_result: Any, parameters: Any, max_norm: Any, total_norm: Any, *_: Any, **__: Any) -> None:
    """Record the gradient norm by which torch scaled gradients."""
    _note_norm(total_norm)


def clipped_by_fsdp(norm: Any, *_: Any, **__: Any) -> None:
    """Record the gradient norm that `clip_grad_norm_` of FSDP returns."""
    _note_norm(norm)
