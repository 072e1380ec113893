"""The scalars that frameworks know: losses, gradient norms and learning rates, recorded without a call of the job.

`capd_client.integrations.counters.frameworks` says where these functions are called. None of them waits for a device.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from capd_client.process.dynamo import untraced
from capd_client.process.log import RateLimitedLog
from capd_client.process.signals import is_interruption
from capd_client.scalars.recording import record, recorded
from capd_client.session.current import running
from capd_client.steps.trial_runs import trying
from capd_client.tensors.inspect import PLAIN_TYPES

__all__ = ["clipped", "lightning", "megatron_losses", "megatron_step", "trainer"]

# What a Trainer logs about its speed, and not about the model.
_SPEED = ("epoch", "total_flos", "num_input_tokens_seen", "_runtime", "_per_second")
_notices = RateLimitedLog()


@untraced
def _note(name: str, value: Any, *, again: bool = True) -> None:
    """Record a scalar, if it is one number and a session runs. Never raises an error of capd.

    Args:
        name: The name.
        value: Anything.
        again: Whether to record it although this iteration has a scalar of this name.
    """
    current = running()
    if current is None or trying() or not _is_number(value):
        return
    try:
        if again or not recorded(current.context, name):
            record(current, name, value)
    except Exception as error:
        if is_interruption(error):
            raise
        _notices.warn("scalar", "the scalar %r of the framework is not recorded: %r", name, error)


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
        # Lightning divides the loss of every micro-batch by their number.
        _note("loss", loss * loop.trainer.accumulate_grad_batches)


def megatron_losses(found: Any) -> None:
    """Record the losses of a micro-batch, by the names that Megatron's loss function gives them."""
    for name, value in found.items() if isinstance(found, Mapping) else ():
        if isinstance(name, str):
            _note(name, _mean(value))


def _mean(value: Any) -> Any:
    """Return the mean of a loss that is given as [sum, number of tokens]; any other value unchanged."""
    pair = isinstance(value, Sequence) and len(value) == 2
    if pair or (isinstance(value, torch.Tensor) and value.shape == (2,)):
        with torch.no_grad():
            return value[0] / value[1]
    return value


def megatron_step(result: Any, *_: Any, **__: Any) -> None:
    """Record the gradient norm that a step of Megatron's optimizer returns. It is 0.0 if none was computed."""
    norm = result[1] if isinstance(result, tuple) and len(result) == 3 else None
    if isinstance(norm, torch.Tensor) or norm:
        _note("grad_norm", norm)


def clipped(norm: Any, *_: Any, **__: Any) -> None:
    """Record the gradient norm that `clip_grad_norm_` of torch or FSDP returns."""
    _note("grad_norm", norm)
