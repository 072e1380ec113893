"""Trial forwards, which look like training and train nothing. They are not captured and are no micro-batches.

A framework runs some trials to look at their results (`trial`). `Trial` finds two more kinds in a watched model. One
kind is a forward under a mode that counts or traces. The other is the forward that gives lazy parameters their shapes.
`bootstrap/_capd_trials.py` does the same for models that are not found yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Optional

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from capd_client.process.log import RateLimitedLog

__all__ = ["MODES", "Trial", "trial", "trying"]

MODES = frozenset(
    {
        "FlopCounterMode",
        "_FlopCounterMode",
        "FakeTensorMode",
        "FunctionalTensorMode",
        "ProxyTorchDispatchMode",
    }
)
"""The dispatch modes under which a forward runs only to be counted or traced."""

_dispatch_modes = torch._C._len_torch_dispatch_stack
_notices = RateLimitedLog()

# The threads that are in trials, once per trial. Every forward looks here, and a thread-local is several times slower.
_trying: list[int] = []


def trying() -> bool:
    """Return whether this thread is in a trial forward, or in its backward."""
    return bool(_trying) and get_ident() in _trying


@contextmanager
def trial() -> Iterator[None]:
    """Make a forward a trial: a context manager around the forward."""
    thread = get_ident()
    _trying.append(thread)
    try:
        yield
    finally:
        _trying.remove(thread)


class Trial:
    """The detector of trials of one model. It also holds the trial under way."""

    __slots__ = ("_lazy", "_model", "_thread")

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._lazy = _initialises(model)
        self._thread = 0

    def begins(self) -> bool:
        """Return whether the forward that begins is a trial. A trial lasts until `end`."""
        if not self._lazy and not _dispatch_modes():
            return False
        self._lazy = self._lazy and _initialises(self._model())
        if self._lazy:
            _notices.info("the forward that initialises lazy modules is a trial: not captured, not counted")
        elif not (mode := _counting_or_tracing()):
            return False
        else:
            _notices.warn("trial", "forwards under %s are taken for trials: not captured, not counted", mode)
        self._thread = get_ident()
        _trying.append(self._thread)
        return True

    def end(self) -> None:
        """End the forward. No effect if it was no trial."""
        if self._thread:
            _trying.remove(self._thread)
            self._thread = 0


def _initialises(model: Optional[nn.Module]) -> bool:
    return model is not None and any(is_lazy(parameter) for parameter in model.parameters())


def _counting_or_tracing() -> str:
    """Return the name of the active mode that only counts or traces; empty if there is none."""
    kinds = (kind.__name__ for mode in _get_current_dispatch_mode_stack() for kind in type(mode).__mro__)
    return next((name.lstrip("_") for name in kinds if name in MODES), "")
