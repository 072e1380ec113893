"""Keeps captures from using up the compilations that torch allows a function.

The names and numbers of a capture are constants of its graph, guarded by comparisons. So `capture(x, layer=self.index)`
in 40 blocks that are compiled one by one would make 40 graphs of one. torch gives up after eight, or raises with
`fullgraph=True`. A function that used half of that limit for other names goes on without captures in its graph. The
other half belongs to the job.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch

__all__ = ["crowded", "note"]

_ENOUGH = 2  # sets of names: two may be a number that is a constant in the first graph and then an input


class _Compilation(NamedTuple):
    """The compilation under way. frame: the function. number: how often it was compiled before."""

    frame: int
    number: int


_named: dict[
    int, dict[int, set[tuple[Any, ...]]]
] = {}  # function → its compilation → what was captured in it


def note(arguments: tuple[Any, ...]) -> None:
    """Remember the names and numbers of the capture that is being traced."""
    now = _now()
    if now is not None:
        names = tuple(None if isinstance(a, torch.SymInt) else a for a in arguments)
        _named.setdefault(now.frame, {}).setdefault(now.number, set()).add(names)


def crowded() -> bool:
    """Whether the function that is being traced was compiled too often already, with other names each time."""
    now = _now()
    if now is None:
        return False
    if not now.number:
        _named.pop(now.frame, None)  # of a function before torch.compiler.reset()
    if now.number < torch._dynamo.config.recompile_limit // 2:
        return False
    before = (names for number, names in _named.get(now.frame, {}).items() if number < now.number)
    return len(set(map(frozenset, before))) > _ENOUGH


def _now() -> Optional[_Compilation]:
    identity = torch._guards.CompileContext.current_compile_id()
    if identity is None or identity.frame_id is None or identity.frame_compile_id is None:
        return None
    return _Compilation(identity.frame_id, identity.frame_compile_id)
