"""Whose module is being called: the larger model whose method calls it, and the name its caller has for it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

__all__ = ["name_of", "owner_of", "trains_others"]

_WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_MOST_HELD = 32  # optimizers or models in a container of the job's
_MEANINGLESS = frozenset({*_WRAPPED, "submod"})  # names that say nothing about a model


def owner_of(module: nn.Module) -> nn.Module:
    """The outermost model that holds `module` and one of whose methods is running; `module` where there is none."""
    owner = module
    for frame in _callers():
        this = frame.f_locals.get(_first_argument(frame))
        if isinstance(this, nn.Module) and this.training and any(part is owner for part in this.modules()):
            owner = this
    return owner


def name_of(module: nn.Module) -> str:
    """What the code that calls `module` calls it ("critic"), else the class's name of what it wraps."""
    for frame in _callers():
        home = str(frame.f_globals.get("__name__", ""))
        for names in () if home.partition(".")[0] == "torch" else _namespaces(frame):
            for name, value in tuple(names.items()):
                meaningless = name in _MEANINGLESS or name.startswith("_") or name == _first_argument(frame)
                if value is module and not meaningless:
                    return str(name)
    return type(_inside(module)).__name__


def trains_others(module: nn.Module) -> bool:
    """Whether the code that calls `module` has another model, too, and an optimizer of that one's parameters."""
    own = {id(parameter) for parameter in nn.Module.parameters(module)}
    trained: set[int] = set()
    others: list[set[int]] = []
    for frame in _callers():
        for names in _namespaces(frame):
            for value in tuple(names.values()):
                for one in _contents(value):
                    kind = type(one)  # isinstance would ask what only stands for something else
                    if issubclass(kind, Optimizer):
                        trained.update(_parameters_of(one))
                    elif issubclass(kind, nn.Module) and "_parameters" in vars(one):  # else it is being made
                        others.append({id(parameter) for parameter in nn.Module.parameters(one)})
    return any(other & trained and not other & own for other in others)


def _contents(value: Any) -> Iterable[Any]:
    """The values of a small container; else the value itself."""
    if type(value) not in (list, tuple, dict) or len(value) > _MOST_HELD:
        return (value,)
    return tuple(value.values() if type(value) is dict else value)


def _parameters_of(optimizer: Any) -> Iterable[int]:
    return (
        id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]
    )


def _namespaces(frame: FrameType) -> Generator[dict[str, Any], None, None]:
    """Where a frame finds what it names: its variables, the attributes of what it is a method of, its globals."""
    yield frame.f_locals
    yield getattr(frame.f_locals.get(_first_argument(frame)), "__dict__", {})
    yield frame.f_globals


def _inside(module: nn.Module) -> nn.Module:
    """The model in its wrappers."""
    inner = next((module._modules[name] for name in _WRAPPED if name in module._modules), None)
    return module if inner is None else _inside(inner)


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
