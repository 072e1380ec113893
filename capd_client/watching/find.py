"""The products of one model or several, the place of each, and whether other ranks may have more of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Optional

from torch import nn

from capd_client.hooks.module_names import Place, place_modules
from capd_client.hooks.sites import Site
from capd_client.integrations import find_sites, multiplies

__all__ = ["find_products", "left_out", "may_be_a_stage"]

Products = list[tuple[Site, Place]]

_PIPELINES = ("torch.distributed.pipelining", "megatron.core.pipeline_parallel", "deepspeed.runtime.pipe")


def find_products(models: Sequence[nn.Module], prefix: str) -> Products:
    """Find the products of the models.

    Args:
        models: The models.
        prefix: The text before every name. If two models have a name in common, each model's number follows it.

    Returns:
        Every product and its place, in the order of the models.
    """
    found = [_products_of(model, prefix) for model in models]
    names = Counter(name for products in found for name in {place.module for _, place in products})
    if any(uses > 1 for uses in names.values()):
        numbered = (f"{prefix}.{number}" if prefix else f"{number}" for number in range(len(models)))
        found = [_products_of(model, name) for model, name in zip(models, numbered, strict=True)]
    return [product for products in found for product in products]


def _products_of(model: nn.Module, prefix: str) -> Products:
    sites = find_sites(model)
    places = place_modules(model, list(sites), prefix=prefix)
    return [(site, places[name].of(site.suffix)) for name, of_module in sites.items() for site in of_module]


def left_out(model: nn.Module, products: Products) -> list[str]:
    """Return the modules that multiply in `model` but have none of these products, as "name (class)"."""
    known = {id(site.module) for site, _ in products}
    found = {
        name: type(m).__name__ for name, m in model.named_modules() if multiplies(m) and id(m) not in known
    }
    return [f"{place.module} ({found[name]})" for name, place in place_modules(model, list(found)).items()]


def may_be_a_stage(layers: Iterable[Optional[int]], world_size: int) -> bool:
    """Return whether a model may be one stage of a pipeline. The imports of the job count, too.

    Args:
        layers: The numbers of the model's layers; None for a module outside of a layer list.
        world_size: The number of ranks.
    """
    first = min((layer for layer in layers if layer is not None), default=0)
    return world_size > 1 and (first > 0 or not sys.modules.keys().isdisjoint(_PIPELINES))
