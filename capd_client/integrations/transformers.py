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
from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping
from types import ModuleType
from typing import Any

from torch import nn

from capd_client.hooks.function_sites import FunctionSite
from capd_client.hooks.owners import is_owned
from capd_client.hooks.sites import Site
from capd_client.integrations.attention_facts import of_transformers
from capd_client.integrations.callers import calls
from capd_client.process.dynamo import traced_as
from capd_client.protocol.kinds import ATTENTION

__all__ = ["find_sites", "is_attention"]

_Function = Callable[..., Any]
_Wrap = Callable[[_Function], _Function]

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_LAYOUT = (("layout", "bhsd"), ("output_layout", "bshd"))


def _site(
    places: Callable[[], Iterable[tuple[Any, str]]], replaced: Callable[[_Function, _Wrap], _Function]
) -> FunctionSite:
    """Return the attention functions that a model may use. They take the module before the operands.

    Args:
        places: As in FunctionSite.
        replaced: Returns the replacement of what `places` names, from it and from the function that taps an attention.
    """

    def tap(attention: _Function) -> _Function:
        # `get_interface` usually gets its function from `__getitem__`, which has tapped it.
        if isinstance(attention, functools.partial) and attention.func is tapped:
            return attention
        return functools.partial(tapped, attention)

    arguments = ("query", "key", "value")
    site = FunctionSite(
        "attention", ATTENTION, arguments, places, skip=2, replaced=lambda function: replaced(function, tap)
    )
    tapped = site.tapped(_call)
    return site


def _call(attention: _Function, *args: Any, **kwargs: Any) -> Any:
    return attention(*args, **kwargs)


def _interface() -> list[tuple[Any, str]]:
    interface = sys.modules["transformers.modeling_utils"].AttentionInterface
    return [(interface, "get_interface"), (interface, "__getitem__")]


def _getter(function: _Function, tap: _Wrap) -> _Function:
    def in_graph(*args: Any, **kwargs: Any) -> Any:
        return tap(function(*args, **kwargs))

    @traced_as(in_graph, calls_the_job=True)
    @functools.wraps(function)
    def get(*args: Any, **kwargs: Any) -> Any:
        attention = function(*args, **kwargs)
        # For modules that are not captured in this step, the cost is only this check.
        return tap(attention) if is_owned() else attention

    return get


# In transformers 5.1 and later every model asks this class, and all registries are its instances.
_INTERFACE = _site(_interface, _getter)


@functools.cache
def _site_in(file: ModuleType) -> FunctionSite:
    """Return the functions of a model's file before 5.1: the registry (a plain dict up to 4.50) and eager attention."""

    def places() -> list[tuple[Any, str]]:
        eager = [name for name in vars(file) if name.endswith("eager_attention_forward")]
        return [(file, name) for name in (_REGISTRY, *eager)]

    return _site(places, _registry_or_function)


def _registry_or_function(value: Any, tap: _Wrap) -> Any:
    return _Registry(value, tap) if isinstance(value, MutableMapping) else tap(value)


class _Registry(ChainMap[str, _Function]):
    """The registry that a file finds while it is watched: the same functions, tapped."""

    def __init__(self, registry: MutableMapping[str, _Function], tap: _Wrap) -> None:
        super().__init__(registry)
        self._tap = tap

    def __getitem__(self, name: str) -> _Function:
        return self._tap(self.maps[0][name])

    def __getattr__(self, name: str) -> Any:
        # Callers may use methods such as `register`.
        return getattr(self.maps[0], name)


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Return the modules of `model` that ask transformers for an attention function, by their qualified names."""
    utils = sys.modules.get("transformers.modeling_utils")
    if utils is None:
        return {}
    return {
        name: [
            Site(
                module,
                ATTENTION,
                function=_function_of(module.__class__, utils),
                attributes=_LAYOUT,
                describe=of_transformers,
            )
        ]
        for name, module in model.named_modules()
        if is_attention(module)
    }


def is_attention(module: nn.Module) -> bool:
    """Whether this module asks transformers for an attention function."""
    utils: Any = sys.modules.get("transformers.modeling_utils")
    kind: type = module.__class__
    return utils is not None and not isinstance(module, utils.PreTrainedModel) and calls(kind, _REGISTRY)


def _function_of(kind: type[nn.Module], utils: ModuleType) -> FunctionSite:
    if hasattr(getattr(utils, "AttentionInterface", None), "get_interface"):
        return _INTERFACE
    # A subclass in another file looks the function up in the globals of its base.
    file = inspect.unwrap(kind.forward).__module__
    return _site_in(sys.modules[file])
