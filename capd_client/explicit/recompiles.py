"""Keeps captures from using up the compilations that torch allows a function.

The names and numbers of a capture are constants of its graph, guarded by comparisons. With
`capture(x, layer=self.index)`, 40 blocks that are compiled one by one need 40 graphs instead of one. torch stops
compiling after eight, or raises with `fullgraph=True`. Captures may use half of this limit for different names. After
it, the function is compiled without captures, and the other half is left for the job.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

__all__ = ["crowded", "note"]

# The sets of names that are allowed. A number may be a constant in the first graph and an input in the next one.
_ENOUGH = 2


class _Compilation(NamedTuple):
    """The current compilation. `frame`: the function. `number`: how often the function was compiled before."""

    frame: int
    number: int


# function → number of its compilation → the names that were captured in it.
_named: dict[int, dict[int, set[tuple[Any, ...]]]] = {}


def note(arguments: tuple[Any, ...]) -> None:
    """Remember the names and numbers of the capture that is being traced."""
    now = _now()
    if now is not None:
        names = tuple(None if isinstance(a, torch.SymInt) else a for a in arguments)
        _named.setdefault(now.frame, {}).setdefault(now.number, set()).add(names)


def crowded() -> bool:
    """Return whether the function that is being traced was already compiled too often, with other names each time."""
    now = _now()
    if now is None:
        return False
    # After torch.compiler.reset(), a function is compiled for the first time again.
    if not now.number:
        _named.pop(now.frame, None)
    if now.number < torch._dynamo.config.recompile_limit // 2:
        return False
    before = (names for number, names in _named.get(now.frame, {}).items() if number < now.number)
    return len(set(map(frozenset, before))) > _ENOUGH


def _now() -> Optional[_Compilation]:
    identity = torch._guards.CompileContext.current_compile_id()
    if identity is None or identity.frame_id is None or identity.frame_compile_id is None:
        return None
    return _Compilation(identity.frame_id, identity.frame_compile_id)
