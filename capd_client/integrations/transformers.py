"""Attention in Hugging Face transformers, 4.48 and later.

A model asks a registry for the function that its configuration names (sdpa, flash_attention_2, flex_attention, one of
the job's own) and passes itself, query, key and value to it; eager attention is a function of the model's own file.
All of them get query as [batch, heads, tokens, width], key and value before they are repeated, and return
[batch, tokens, heads, width]. What they call inside, F.scaled_dot_product_attention say, is the same product.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from types import ModuleType
from typing import Any

from torch import nn

from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.owners import is_owned
from capd_client.hooks.sites import Site
from capd_client.integrations.callers import calls
from capd_client.process.dynamo import traced_as
from capd_client.protocol.kinds import ATTENTION

__all__ = ["find_sites"]

_Function = Callable[..., Any]

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_LAYOUT = (("layout", "bhsd"), ("output_layout", "bshd"))


class _Attention(FunctionSite):
    """Attention functions, whichever a model is given; they are called with the module before the operands."""

    def __init__(self) -> None:
        super().__init__("attention", ATTENTION, ("query", "key", "value"), skip=2)
        self._tapped_call = super().wrap(_call)

    def tapped(self, attention: _Function) -> _Function:
        """`attention` with taps on its calls, once: `get_interface` has it from `__getitem__` as a rule."""
        if isinstance(attention, functools.partial) and attention.func is self._tapped_call:
            return attention
        return functools.partial(self._tapped_call, attention)


def _call(attention: _Function, *args: Any, **kwargs: Any) -> Any:
    return attention(*args, **kwargs)


class _Interface(_Attention):
    """transformers 5.1 and later: every model asks the one class that all registries are of."""

    def patches(self) -> list[tuple[Any, str]]:
        interface = sys.modules["transformers.modeling_utils"].AttentionInterface
        return [(interface, "get_interface"), (interface, "__getitem__")]

    def wrap(self, function: _Function) -> _Function:
        def in_graph(*args: Any, **kwargs: Any) -> Any:
            return self.tapped(function(*args, **kwargs))

        @traced_as(in_graph, calls_the_job=True)
        @functools.wraps(function)
        def get(*args: Any, **kwargs: Any) -> Any:
            attention = function(*args, **kwargs)
            # Outside of the modules that are captured in this step it costs no more than this.
            return self.tapped(attention) if is_owned() else attention

        return get


class _File(_Attention):
    """Before that: each model's file has the registry, a plain dict up to 4.50, and its eager attention as globals."""

    def __init__(self, file: ModuleType) -> None:
        super().__init__()
        self._file = file

    def patches(self) -> list[tuple[Any, str]]:
        eager = [name for name in vars(self._file) if name.endswith("eager_attention_forward")]
        return [(self._file, name) for name in (_REGISTRY, *eager)]

    def wrap(self, function: Any) -> Any:
        return (
            _Registry(function, self.tapped)
            if isinstance(function, MutableMapping)
            else self.tapped(function)
        )


class _Registry(MutableMapping[str, _Function]):
    """What a file finds in the place of the registry: the same functions, tapped."""

    def __init__(
        self, registry: MutableMapping[str, _Function], tapped: Callable[[_Function], _Function]
    ) -> None:
        self._registry = registry
        self._tapped = tapped

    def __getitem__(self, name: str) -> _Function:
        return self._tapped(self._registry[name])

    def __setitem__(self, name: str, function: _Function) -> None:
        self._registry[name] = function

    def __delitem__(self, name: str) -> None:
        del self._registry[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)  # `register` and the like


_INTERFACE = _Interface()
_files: dict[str, _File] = {}


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """The modules of `model` that ask transformers for an attention function."""
    utils = sys.modules.get("transformers.modeling_utils")
    if utils is None:
        return {}
    return {
        name: [Site(module, ATTENTION, function=_function_of(module.__class__, utils), attributes=_LAYOUT)]
        for name, module in model.named_modules()
        if not isinstance(module, utils.PreTrainedModel) and calls(module.__class__, _REGISTRY)
    }


def _function_of(kind: type[nn.Module], utils: ModuleType) -> FunctionSite:
    if hasattr(getattr(utils, "AttentionInterface", None), "get_interface"):
        return _INTERFACE
    file = inspect.unwrap(kind.forward).__module__  # a subclass in another file asks by its base's globals
    return _files.setdefault(file, _File(sys.modules[file]))
