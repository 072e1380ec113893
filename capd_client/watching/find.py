"""The products of one model or several, and the place of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from capd_client.hooks.module_names import Place, place_modules
from capd_client.hooks.sites import Site
from capd_client.integrations import find_sites, multiplies

__all__ = ["find_products", "left_out"]

Products = list[tuple[Site, Place]]


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
