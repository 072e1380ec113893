"""Numbers that a job gives tensor_saver's calls by hand or in variables: each read, and complained about, once.

What is no number is named in one warning, and the next source counts.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Optional

import torch

from capd_client.errors import ConfigError
from capd_client.process.log import Notices
from capd_client.process.ranks import RANK_VARIABLES, distributed_ready, index_in, rank_in
from capd_client.protocol.key import MAX_INDEX
from capd_client.steps.context import as_index

__all__ = ["get_rank_from_tensor_device", "index_of_variable", "rank_of_process", "say_once", "usable"]

_MAX_REMEMBERED = 1000
_notices = Notices()
_said: set[tuple[str, str]] = set()  # what was warned of, for good: whose value, and what it is


def usable(name: str, value: Any) -> Optional[int]:
    """A value that somebody gave as an index; None, said once, for one that is none."""
    if value is None:
        return None
    try:
        return as_index(name, value)
    except ConfigError as error:  # its words, as showing a tensor would wait for its device
        say_once(name, str(error)[:160], f"{error}; the next source counts")
    except Exception as error:  # of a value that cannot be asked, or shown
        problem = f"{name} cannot be read: {type(error).__name__}; the next source counts"
        say_once(name, type(value).__name__, problem)
    return None


def index_of_variable(variable: str) -> Optional[int]:
    """The number in a variable, as it is now; None where there is none."""
    return _index_in(variable, os.environ.get(variable))


def rank_of_process() -> tuple[Optional[int], str]:
    """The rank by torch.distributed, else by the launcher's variables as they are now, and its source."""
    if distributed_ready():
        from torch import distributed

        return distributed.get_rank(), "torch.distributed"
    rank, local = os.environ.get("RANK"), os.environ.get("LOCAL_RANK")
    # They say which of the two comes first. Each look takes a microsecond.
    sizes = (None, None) if local is None else map(os.environ.get, RANK_VARIABLES[2:])
    return _rank_in((rank, local, *sizes))


def get_rank_from_tensor_device(tensor: torch.Tensor) -> Optional[int]:
    """The number of the GPU that holds the tensor; None for any other tensor."""
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


# Variables are asked for at every call, and hardly ever change: what a text says is found out once.
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
        _index_in(variable, environ.get(variable))  # to say what cannot be read
    return rank_in(environ)
