"""Forwards that train nothing though they look like training: nothing of them is captured, and they are no micro-batch.

A framework runs some to see what comes out of them (`trial`). Of a watched model those are known that are run under a
mode that counts or traces, and the one that gives lazy parameters their shapes (`Trial`). `bootstrap/_capd_trials.py`
knows the same of models that are not found yet.
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

from capd_client.process.log import Notices

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
"""Classes of dispatch modes under which a forward is run to be counted or traced."""

_dispatch_modes = torch._C._len_torch_dispatch_stack
_notices = Notices()

# The threads that are in one, once for each. A thread-local costs several times as much to look at, in every forward.
_trying: list[int] = []


def trying() -> bool:
    """Whether this thread is in such a forward, or its backward."""
    return bool(_trying) and get_ident() in _trying


@contextmanager
def trial() -> Iterator[None]:
    """Around such a forward."""
    thread = get_ident()
    _trying.append(thread)
    try:
        yield
    finally:
        _trying.remove(thread)


class Trial:
    """Which forwards of one model are trials; it holds the one that is under way."""

    __slots__ = ("_lazy", "_model", "_thread")

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._lazy = _initialises(model)
        self._thread = 0

    def begins(self) -> bool:
        """Whether the forward that begins is one; until `end`, then."""
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
        """The forward is over; does nothing where it was no trial."""
        if self._thread:
            _trying.remove(self._thread)
            self._thread = 0


def _initialises(model: Optional[nn.Module]) -> bool:
    return model is not None and any(is_lazy(parameter) for parameter in model.parameters())


def _counting_or_tracing() -> str:
    """The mode that this thread computes under only to be counted or traced; empty: none."""
    kinds = (kind.__name__ for mode in _get_current_dispatch_mode_stack() for kind in type(mode).__mro__)
    return next((name.lstrip("_") for name in kinds if name in MODES), "")
