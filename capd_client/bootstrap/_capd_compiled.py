"""The search for roots where code is compiled: what `torch.compile` returns is looked at before it runs.

A hook that the compiler meets is traced, guarded, and its graph compiled again once the hook is gone. So compiled code
runs without ours, and what it will call is looked at first: a compiled model itself (`torch.compile(model)`,
`model.compile()`), and of a compiled function the models that it refers to and is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Compiling"]


class Search(Protocol):
    """What is told of compiled code that is about to run."""

    running: bool

    def look_at(self, module: nn.Module, args: tuple[Any, ...]) -> bool: ...
    def paused(self) -> AbstractContextManager[None]: ...


class Compiling:
    """Puts itself in the place of `torch.compile` while `search` runs."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._original = torch.compile
        self._ours: Callable[..., Any] | None = None
        self._classes: list[tuple[type[nn.Module], Any, Any]] = []  # class, its own __call__, ours

    def begin(self) -> None:
        """Take the place of `torch.compile`, of which `Module.compile` makes use, too."""
        original = self._original = torch.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - its name
            return self._followed(original(*args, **kwargs))

        self._ours = torch.compile = compile

    def end(self) -> None:
        """Give the place back, unless somebody has taken it from us. What is compiled stays as it is."""
        if torch.compile is self._ours:
            torch.compile = self._original
        for kind, own, ours in self._classes:
            if kind.__call__ is ours:
                kind.__call__ = own  # type: ignore[method-assign]
        self._classes = []

    def _followed(self, compiled: Any) -> Any:
        if not self._search.running:
            return compiled
        if isinstance(compiled, nn.Module):
            self._follow_models(type(compiled))
            return compiled
        function = getattr(compiled, "_torchdynamo_orig_callable", None)
        return compiled if function is None else self._follow_function(compiled, function)

    def _follow_models(self, kind: type[nn.Module]) -> None:
        """Look at compiled models before torch asks whether there are global hooks, of which it warns."""
        if not hasattr(kind, "_opt_mod_attributes") or any(kind is known for known, _, _ in self._classes):
            return
        search, own = self._search, kind.__call__

        @functools.wraps(own)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not search.running:
                return own(module, *args, **kwargs)
            _look_at(search, (module,), args)
            with search.paused():
                return own(module, *args, **kwargs)

        kind.__call__ = call  # type: ignore[method-assign]
        self._classes.append((kind, own, call))

    def _follow_function(self, compiled: Callable[..., Any], function: Any) -> Callable[..., Any]:
        search = self._search

        @functools.wraps(compiled)  # with the attributes by which the compiler knows what it has made
        def call(*args: Any, **kwargs: Any) -> Any:
            if not search.running:
                return compiled(*args, **kwargs)
            _look_at(search, _models_of(function, args, kwargs), args)
            with search.paused():
                return compiled(*args, **kwargs)

        call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]  # compiled again, it is unwrapped
        return call


def _look_at(search: Search, modules: Iterable[nn.Module], args: tuple[Any, ...]) -> None:
    try:
        for module in modules:
            search.look_at(module, args)
    except Exception:  # noqa: S110 - noted where it happened
        pass


def _models_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """The models that a function is bound to, is called with, or refers to; larger ones first."""
    owner = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", function)
    names = getattr(getattr(plain, "__code__", None), "co_names", ())
    found = [owner, *args, *kwargs.values()]
    if not isinstance(owner, nn.Module):
        found += [getattr(plain, "__globals__", {}).get(name) for name in names]
        found += [getattr(owner, "__dict__", {}).get(name) for name in names]
        found += [_content(cell) for cell in getattr(plain, "__closure__", None) or ()]
    modules = {id(value): value for value in found if isinstance(value, nn.Module)}
    return sorted(modules.values(), key=lambda module: -sum(1 for _ in module.modules()))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
