"""The owner of a module that is called: the larger model whose method calls it, and the caller's name for it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

__all__ = ["name_of", "owner_of", "trains_others"]

_WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
# The most optimizers or models in one of the job's containers.
_MOST_HELD = 32
# Names that say nothing about a model.
_MEANINGLESS = frozenset({*_WRAPPED, "submod"})


def owner_of(module: nn.Module) -> nn.Module:
    """Return the outermost model that holds `module` and has a running method. Return `module` if there is none."""
    owner = module
    for frame in _callers():
        this = frame.f_locals.get(_first_argument(frame))
        if isinstance(this, nn.Module) and this.training and any(part is owner for part in this.modules()):
            owner = this
    return owner


def name_of(module: nn.Module) -> str:
    """Return the name that the calling code uses for `module` ("critic").

    If it has none, return the class name of the unwrapped model.
    """
    for frame in _callers():
        home = str(frame.f_globals.get("__name__", ""))
        for names in () if home.partition(".")[0] == "torch" else _namespaces(frame):
            for name, value in tuple(names.items()):
                meaningless = name in _MEANINGLESS or name.startswith("_") or name == _first_argument(frame)
                if value is module and not meaningless:
                    return str(name)
    return type(_inside(module)).__name__


def trains_others(module: nn.Module) -> bool:
    """Whether the code that calls `module` also has another model, and an optimizer of that model's parameters."""
    own = {id(parameter) for parameter in nn.Module.parameters(module)}
    trained: set[int] = set()
    others: list[set[int]] = []
    for frame in _callers():
        for names in _namespaces(frame):
            for value in tuple(names.values()):
                for one in _contents(value):
                    # isinstance would run the code of a proxy.
                    kind = type(one)
                    if issubclass(kind, Optimizer):
                        trained.update(_parameters_of(one))
                    elif issubclass(kind, nn.Module) and "_parameters" in vars(one):
                        # A module without `_parameters` is still in its constructor.
                        others.append({id(parameter) for parameter in nn.Module.parameters(one)})
    return any(other & trained and not other & own for other in others)


def _contents(value: Any) -> Iterable[Any]:
    """Return the values of a small container. For anything else, return the value itself."""
    if type(value) not in (list, tuple, dict) or len(value) > _MOST_HELD:
        return (value,)
    return tuple(value.values() if type(value) is dict else value)


def _parameters_of(optimizer: Any) -> Iterable[int]:
    return (
        id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]
    )


def _namespaces(frame: FrameType) -> Generator[dict[str, Any], None, None]:
    """Yield the namespaces of a frame: its variables, the attributes of its `self`, and its globals."""
    yield frame.f_locals
    yield getattr(frame.f_locals.get(_first_argument(frame)), "__dict__", {})
    yield frame.f_globals


def _inside(module: nn.Module) -> nn.Module:
    """Return the model inside its wrappers."""
    inner = next((module._modules[name] for name in _WRAPPED if name in module._modules), None)
    return module if inner is None else _inside(inner)


def _first_argument(frame: FrameType) -> str:
    """Return the name that a method uses for `self`."""
    code = frame.f_code
    return str(code.co_varnames[0]) if code.co_argcount else ""


def _callers() -> Generator[FrameType, None, None]:
    """Yield the frames around us that are neither ours nor torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        home = str(frame.f_globals.get("__name__", ""))
        if not home.startswith(("_capd_", "capd_client.", "torch.nn.modules.module", "torch._dynamo.")):
            yield frame
        frame = frame.f_back
