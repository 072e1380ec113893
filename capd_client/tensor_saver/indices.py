"""The numbers that a job passes to tensor_saver's calls, or sets in variables. Each is read and reported once.

A value that is not a number is named in one warning. Then the next source counts.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Optional

import torch

from capd_client.errors import ConfigError
from capd_client.process.log import RateLimitedLog
from capd_client.process.ranks import RANK_VARIABLES, distributed_ready, index_in, rank_in
from capd_client.protocol.key import MAX_INDEX
from capd_client.steps.context import as_index

__all__ = ["get_rank_from_tensor_device", "index_of_variable", "rank_of_process", "say_once", "usable"]

_MAX_REMEMBERED = 1000
_notices = RateLimitedLog()
# Each warning is given once: the name of the value's source, and the value.
_said: set[tuple[str, str]] = set()


def usable(name: str, value: Any) -> Optional[int]:
    """Return a value that somebody passed as an index. Return None, and warn once, if it is not an index."""
    if value is None:
        return None
    try:
        return as_index(name, value)
    except ConfigError as error:
        # The error's text identifies the value, because showing a tensor would wait for its device.
        say_once(name, str(error)[:160], f"{error}; the next source counts")
    except Exception as error:
        # The value's own code raised, even when it was shown.
        problem = f"{name} cannot be read: {type(error).__name__}; the next source counts"
        say_once(name, type(value).__name__, problem)
    return None


def index_of_variable(variable: str) -> Optional[int]:
    """Return the current number in a variable. None if there is none."""
    return _index_in(variable, os.environ.get(variable))


def rank_of_process() -> tuple[Optional[int], str]:
    """Return the rank and its source: torch.distributed, or else the current variables of the launcher."""
    if distributed_ready():
        from torch import distributed

        return distributed.get_rank(), "torch.distributed"
    rank, local = os.environ.get("RANK"), os.environ.get("LOCAL_RANK")
    # The sizes decide which of the two comes first. Each look takes a microsecond.
    sizes = (None, None) if local is None else map(os.environ.get, RANK_VARIABLES[2:])
    return _rank_in((rank, local, *sizes))


def get_rank_from_tensor_device(tensor: torch.Tensor) -> Optional[int]:
    """Return the number of the GPU that holds the tensor. None for any other tensor."""
    device = getattr(tensor, "device", None)
    index = getattr(device, "index", None)
    return (
        index if getattr(device, "type", "cpu") != "cpu" and isinstance(index, int) and index >= 0 else None
    )


def say_once(name: str, value: str, problem: str) -> None:
    """Warn of `problem`, unless there was a warning for this value of `name` before."""
    if (name, value) not in _said and len(_said) < _MAX_REMEMBERED:
        _said.add((name, value))
        _notices.warn(f"{name} {value}", "%s", problem)


# Variables are read at every call and hardly ever change, so each text is parsed once.
@lru_cache(maxsize=_MAX_REMEMBERED)
def _index_in(variable: str, text: Optional[str]) -> Optional[int]:
    index = index_in({variable: text or ""}, variable, MAX_INDEX)
    if index is None and text:
        problem = f"{variable}={text!r:.80} is not a number; the next source counts"
        say_once(variable, text, problem)
    return index


@lru_cache(maxsize=_MAX_REMEMBERED)
def _rank_in(texts: tuple[Optional[str], ...]) -> tuple[Optional[int], str]:
    environ = {name: text for name, text in zip(RANK_VARIABLES, texts, strict=True) if text is not None}
    for variable in ("RANK", "LOCAL_RANK"):
        # The call warns of a variable that cannot be read.
        _index_in(variable, environ.get(variable))
    return rank_in(environ)
