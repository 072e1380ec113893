"""The search for roots in compiled code: looks at the result of `torch.compile` before it runs.

A hook that the compiler meets is traced and guarded. Its graph is compiled again once the hook is removed. So
compiled code runs without our hooks, and the search looks first at the models that the code will call. For a
compiled model (`torch.compile(model)`, `model.compile()`) this is the model itself. For a compiled function these
are the models that it refers to and is called with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["Compiling"]


class Compiling:
    """The replacement of `torch.compile` while `search` runs (`_capd_roots`, which imports this file)."""

    def __init__(self, search: Any) -> None:
        self._search = search
        self._original = torch.compile
        self._ours: Callable[..., Any] | None = None
        # Each class, its own __call__, and our replacement.
        self._classes: list[tuple[type[nn.Module], Any, Any]] = []

    def begin(self) -> None:
        """Replace `torch.compile`, which `Module.compile` also uses."""
        original = self._original = torch.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001
            return self._followed(original(*args, **kwargs))

        self._ours = torch.compile = compile

    def end(self) -> None:
        """Restore `torch.compile`, unless somebody has replaced ours. Compiled code stays as it is."""
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
        """Look at compiled models before torch checks for global hooks, because torch warns of global hooks."""
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

        # The attributes are copied, too: by them the compiler recognises its results.
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not search.running:
                return compiled(*args, **kwargs)
            _look_at(search, _models_of(function, args, kwargs), args)
            with search.paused():
                return compiled(*args, **kwargs)

        # If it is compiled again, the compiler unwraps it by this attribute.
        call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]
        return call


def _look_at(search: Any, modules: Iterable[nn.Module], args: tuple[Any, ...]) -> None:
    try:
        for module in modules:
            search.look_at(module, args)
    except Exception:  # noqa: S110 - noted where it happened
        pass


def _models_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """Return the models that a function is bound to, is called with, or refers to. Larger models come first."""
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
    except ValueError:
        # The variable is not bound yet.
        return None
