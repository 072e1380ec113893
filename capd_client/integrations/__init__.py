"""The frameworks' products: finds where each framework multiplies in a model. Nothing here imports a framework."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from torch import nn

from capd_client.hooks.sites import Site
from capd_client.integrations import (
    linears,
    megatron,
    torch_nn,
    torchtitan,
    transformer_engine,
    transformers,
    transformers_experts,
)
from capd_client.tensors.placements import coordinates

__all__ = ["find_sites", "multiplies"]

_FINDERS: tuple[Callable[[nn.Module], dict[str, list[Site]]], ...] = (
    megatron.find_sites,
    transformer_engine.find_sites,
    linears.find_sites,
    transformers.find_sites,
    transformers_experts.find_sites,
    torchtitan.find_sites,
    torch_nn.find_sites,
)
"""The finders, the most specific first. If two of them find the same product, the earlier one counts."""


def find_sites(model: nn.Module) -> dict[str, list[Site]]:
    """Find every product of `model` that can be tapped.

    Returns:
        The sites by the qualified name of their module, in the model's order.
    """
    found: dict[str, list[Site]] = {}
    for find in _FINDERS:
        for name, sites in find(model).items():
            known = found.setdefault(name, [])
            taken = {(site.kind, site.suffix) for site in known}
            known.extend(site for site in sites if (site.kind, site.suffix) not in taken)
    place = (*coordinates(model.parameters()), *_dropout(model))
    shared = _SharedParameters(model)
    return {
        name: _at(place, [_with_tie(site, shared) for site in found[name]])
        for name, _ in model.named_modules()
        if found.get(name)
    }


def multiplies(module: nn.Module) -> bool:
    """Whether the module multiplies. Such a module may do it in a way that `find_sites` does not know."""
    return linears.is_linear(module) or megatron.is_one_kernel(module)


class _SharedParameters:
    """The parameters that several modules of a model have: when it is watched, and when a gradient is captured."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.at_first = _shared_parameters(model)

    @cached_property
    def afterwards(self) -> frozenset[int]:
        """The same when it is first asked for: a job may tie weights after its model is watched."""
        model = self._model()
        return frozenset() if model is None else _shared_parameters(model)

    def has(self, name: str, module: nn.Module) -> bool:
        """Return whether a parameter of the module was tied afterwards."""
        return id(module._parameters.get(name)) in self.afterwards


def _shared_parameters(model: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters that several modules of the model have, such as a head tied to an embedding."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in {id(one): one for one in module._parameters.values() if one is not None}.values()
    )
    return frozenset(number for number, count in holders.items() if count > 1)


def _with_tie(site: Site, shared: _SharedParameters) -> Site:
    """Return the site, with the attribute `tied` for the gradient of a parameter that another module has, too.

    A layer whose own weight is None gets its weight as an argument, from the module that has it.
    """
    name = site.kind.parameter
    own = site.module._parameters
    if not name:
        return site
    if not (id(own.get(name)) in shared.at_first or (name in own and own[name] is None)):
        return site._replace(tied=partial(shared.has, name))
    gradient = f"grad_{name}"
    of_tensor = dict(site.of_tensor)
    of_tensor[gradient] = (*of_tensor.get(gradient, ()), ("tied", True))
    return site._replace(of_tensor=tuple(of_tensor.items()))


def _dropout(model: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return the largest probability of the model's dropout, if there is any: ranks and runs may draw differently."""
    kinds = (nn.modules.dropout._DropoutNd,)
    largest = max((float(module.p) for module in model.modules() if isinstance(module, kinds)), default=0.0)
    return (("dropout", largest),) if largest > 0 else ()


def _at(place: tuple[tuple[str, Any], ...], sites: list[Site]) -> list[Site]:
    """Return the sites with facts of the model: this rank's place in its device mesh, its dropout, the module's class.

    Attributes of the framework take precedence.
    """
    return [
        site._replace(
            attributes=tuple(
                {"class": type(site.module).__name__, **dict(place), **dict(site.attributes)}.items()
            )
        )
        for site in sites
    ]
