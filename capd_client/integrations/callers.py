"""The callers of a function: which classes of modules use it. Only the names in their code are read; nothing runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

__all__ = ["calls", "importers_of", "names_in"]

# The number of functions between a module's method and the function that is looked for.
_MAX_DEPTH = 4


@lru_cache(maxsize=4096)
def calls(kind: type, name: str) -> bool:
    """Whether a method of `kind`, or a function that its methods call by a global name, mentions `name`.

    Methods of torch.nn's own classes count only for those classes, because every model inherits nn.Module.
    """
    methods = (
        value
        for base in kind.__mro__
        if base is not nn.Module and base is not object
        for value in vars(base).values()
    )
    seen: set[CodeType] = set()
    return any(_mentions(function, name, _MAX_DEPTH, seen) for function in map(_plain, methods) if function)


def importers_of(function: Any) -> list[tuple[Any, str]]:
    """Return the modules outside torch that hold `function`, each with the name that it uses."""
    found: list[tuple[Any, str]] = []
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and (module.__name__ or "").partition(".")[0] != "torch":
            found += [(module, name) for name, value in list(vars(module).items()) if value is function]
    return found


def names_in(function: Any) -> set[str]:
    """Return the names that the code of a method uses."""
    plain = _plain(function)
    return set() if plain is None else set(_names(plain.__code__))


def _plain(value: Any) -> FunctionType | None:
    """Return the function inside a method, without its decorators."""
    # Static and class methods keep the function here.
    value = getattr(value, "__func__", value)
    # Properties keep the getter here.
    value = getattr(value, "fget", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _mentions(function: FunctionType, name: str, depth: int, seen: set[CodeType]) -> bool:
    if function.__code__ in seen:
        return False
    seen.add(function.__code__)
    names = set(_names(function.__code__))
    if name in names or any(_is_named(function.__globals__.get(used), name) for used in names):
        return True
    return depth > 0 and any(_mentions(callee, name, depth - 1, seen) for callee in _callees(function, names))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function uses, including its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_named(value: Any, name: str) -> bool:
    """Whether `value` is a function with this own name. It may have been imported under another name."""
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and value.__name__ == name


def _callees(function: FunctionType, names: set[str]) -> Iterator[FunctionType]:
    """Yield the job's functions that these names may mean: globals, and members of imported modules."""
    for name in names:
        value = function.__globals__.get(name)
        in_module = isinstance(value, ModuleType)
        members = [vars(value).get(other) for other in names] if in_module else [value]
        for member in map(_plain, members):
            if member is not None and not _is_torch(member):
                yield member


def _is_torch(function: FunctionType) -> bool:
    package = (function.__module__ or "").partition(".")[0]
    return package in sys.stdlib_module_names or package == "torch"
