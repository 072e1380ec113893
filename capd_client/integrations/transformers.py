"""Attention in Hugging Face transformers, 4.48 and later.

A model asks a registry for the attention function that its configuration names. Examples are sdpa,
flash_attention_2, flex_attention, and functions of the job. The model passes itself, query, key and value to the
function. Eager attention is a function of the model's own file.

All these functions get query as [batch, heads, tokens, width], key and value before they are repeated. They return
[batch, tokens, heads, width]. Calls inside them, such as F.scaled_dot_product_attention, are the same product.
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
    """The attention functions that a model may use. They take the module before the operands."""

    def __init__(self) -> None:
        super().__init__("attention", ATTENTION, ("query", "key", "value"), skip=2)
        self._tapped_call = super().wrap(_call)

    def tapped(self, attention: _Function) -> _Function:
        """Return `attention` with taps on its calls.

        A tapped function is returned unchanged: `get_interface` usually gets its function from `__getitem__`.
        """
        if isinstance(attention, functools.partial) and attention.func is self._tapped_call:
            return attention
        return functools.partial(self._tapped_call, attention)


def _call(attention: _Function, *args: Any, **kwargs: Any) -> Any:
    return attention(*args, **kwargs)


class _Interface(_Attention):
    """The registry class of transformers 5.1 and later.

    Every model asks this class, and all registries are its instances.
    """

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
            # For modules that are not captured in this step, the cost is only this check.
            return self.tapped(attention) if is_owned() else attention

        return get


class _File(_Attention):
    """A model's file in transformers before 5.1.

    Its globals are the registry (a plain dict up to 4.50) and eager attention.
    """

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
    """The registry that a file finds while it is watched: the same functions, tapped."""

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
        # Callers may use methods such as `register`.
        return getattr(self._registry, name)


_INTERFACE = _Interface()
_files: dict[str, _File] = {}


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the modules of `model` that ask transformers for an attention function, by their qualified names."""
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
    # A subclass in another file looks the function up in the globals of its base.
    file = inspect.unwrap(kind.forward).__module__
    return _files.setdefault(file, _File(sys.modules[file]))
