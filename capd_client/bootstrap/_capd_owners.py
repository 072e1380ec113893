"""Whose module is being called: the larger model whose method calls it, and the name its caller has for it."""

from __future__ import annotations

import sys
from collections.abc import Generator
from types import FrameType

from torch import nn

__all__ = ["name_of", "owner_of"]


def owner_of(module: nn.Module) -> nn.Module:
    """The outermost model that holds `module` and one of whose methods is running; `module` where there is none."""
    owner = module
    for frame in _callers():
        this = frame.f_locals.get(_first_argument(frame))
        if isinstance(this, nn.Module) and this.training and any(part is owner for part in this.modules()):
            owner = this
    return owner


def name_of(module: nn.Module) -> str:
    """What the code that calls `module` calls it ("critic"), else its class's name."""
    for frame in _callers():
        first = _first_argument(frame)
        this = frame.f_locals.get(first)
        for names in (frame.f_locals, getattr(this, "__dict__", {}), frame.f_globals):
            for name, value in tuple(names.items()):
                if value is module and name != first and not name.startswith("_"):
                    return str(name)
    return type(module).__name__


def _first_argument(frame: FrameType) -> str:
    """Of a method, what it calls `self`."""
    code = frame.f_code
    return str(code.co_varnames[0]) if code.co_argcount else ""


def _callers() -> Generator[FrameType, None, None]:
    """The frames around us that are neither ours nor torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if not home.startswith(("_capd_", "capd_client.", "torch.nn.modules.module", "torch._dynamo.")):
            yield frame
        frame = frame.f_back
