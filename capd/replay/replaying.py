"""The replay of calls: each is read once, and each of its products is computed in every recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from capd.io.items import UNREADABLE, Skipped, skipped
from capd.products.captured.calls import ProductCall, Value
from capd.replay.captured import captured_distances
from capd.replay.exact_product import ExactProduct, exact_product
from capd.replay.groups import ReplayGroups
from capd.replay.operands import ShapeMismatch, Taken, operands_of
from capd.replay.product_sums import OperandPair, measure_product
from capd.replay.recipes import OPERANDS_OF, ReplayRecipe
from capd.replay.request import TITLES, ReplayRequest
from capd.replay.sums import ProductSums
from capd_client.formats import FormatError

__all__ = ["Replayed", "replay", "replay_product", "replay_recipe"]

Wanted = Mapping[str, Sequence[ReplayRecipe]]
"""The recipes in which each product is replayed."""


@dataclass(slots=True)
class Replayed:
    """What a replay found.

    Attributes:
        groups: The sums.
        found: The calls with an input or an output gradient.
        replayed: The calls of which at least one product was replayed.
        of_some_rows: The replayed calls of which some tokens were taken.
        partial: The replayed calls of which slices of tokens were captured. They have no dW.
        left_out: The products that could not be replayed, by reason.
        skipped: The calls whose operands could not be read.
        ranks: The ranks of the replayed calls.
    """

    groups: ReplayGroups
    found: int = 0
    replayed: int = 0
    of_some_rows: int = 0
    partial: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)
    ranks: set[Value] = field(default_factory=set)


def replay(
    calls: Sequence[ProductCall], request: ReplayRequest, replayed: Replayed
) -> Iterator[Skipped | ProductCall]:
    """Replay calls one after the other, and add them to `replayed`. The memory is that of one call.

    Yields:
        Each call after it was added or left out, or the reason why it was skipped.
    """
    for call in calls:
        replayed.found += 1
        possible = _possible(call, request, replayed.left_out)
        if not possible:
            yield call
            continue
        try:
            parts = list(_replayed_parts(call, possible, request, replayed.left_out))
        except ShapeMismatch as error:
            for product in possible:
                replayed.left_out[f"{TITLES[product]}: shapes that do not multiply"] += 1
            yield Skipped(call.name, str(error))
            continue
        except UNREADABLE as error:
            replayed.skipped.append(skipped(call.name, error, damaged=True))
            yield replayed.skipped[-1]
            continue
        for suffix, _, found in parts:
            place = {**call.place, "module": f"{call.place['module']}{suffix}"}
            for product, sums in found.items():
                replayed.groups.add(place, {recipe: {product: one} for recipe, one in sums.items()})
        if any(sums for _, _, found in parts for sums in found.values()):
            replayed.replayed += 1
            replayed.ranks.add(call.place["rank"])
            replayed.of_some_rows += any(of_some for _, of_some, _ in parts)
            replayed.partial += call.is_partial
        yield call


def _possible(call: ProductCall, request: ReplayRequest, left_out: Counter[str]) -> Wanted:
    """Return the recipes of each product whose operands were captured, and count the others by reason."""
    found: dict[str, list[ReplayRecipe]] = {}
    for product in request.products:
        reason = call.reason(product, OPERANDS_OF[product])
        if reason is not None:
            left_out[f"{TITLES[product]}: {reason}"] += 1
            continue
        for recipe in request.recipes:
            reason = call.reason(product, recipe.needs(product))
            if reason is None:
                found.setdefault(product, []).append(recipe)
            else:
                left_out[f"{TITLES[product]} in {recipe.name}: {reason}"] += 1
    return found


def _replayed_parts(
    call: ProductCall, wanted: Wanted, request: ReplayRequest, left_out: Counter[str]
) -> Iterator[tuple[str, bool, Mapping[str, Mapping[str, ProductSums]]]]:
    """Yield the expert's suffix or "", whether some tokens were taken, and the sums by product and recipe."""
    names = frozenset(
        name for product, recipes in wanted.items() for recipe in recipes for name in recipe.needs(product)
    )
    for suffix, taken in operands_of(call, names, request.rows):
        name = call.name + suffix
        found = {
            product: replay_product(taken, product, recipes, request, name, left_out)
            for product, recipes in wanted.items()
        }
        for recipe in request.recipes if not call.is_grouped else ():
            done = [product for product, sums in found.items() if recipe.name in sums]
            for product, distance in captured_distances(call, taken, recipe, done).items():
                found[product][recipe.name].captured = distance
        yield suffix, taken.rows is not None, found


def replay_product(
    taken: Taken,
    product: str,
    recipes: Sequence[ReplayRecipe],
    request: ReplayRequest,
    call: str = "",
    left_out: Counter[str] | None = None,
) -> Mapping[str, ProductSums]:
    """Return the sums of one product of a call by the recipe's name.

    Args:
        taken: The operands.
        product: "y", "dx" or "dw".
        recipes: The recipes.
        request: What is to be replayed.
        call: The name of the call in messages.
        left_out: Counts the recipes that do not take the operands.

    Raises:
        FormatError: A recipe does not take the operands, and nothing counts that.
    """
    exact = exact_product(*ReplayRecipe.plain(product, taken.operands))
    found = {}
    for recipe in recipes:
        try:
            found[recipe.name] = replay_recipe(recipe, taken, product, exact, request, call)
        except FormatError as error:
            if left_out is None:
                raise
            # What follows is of this call alone.
            left_out[f"{TITLES[product]} in {recipe.name}: {str(error).partition(';')[0]}"] += 1
    return found


@torch.no_grad()
def replay_recipe(
    recipe: ReplayRecipe,
    taken: Taken,
    product: str,
    exact: ExactProduct,
    request: ReplayRequest,
    call: str = "",
) -> ProductSums:
    """Return the sums of one product of a call in one recipe. `exact` is the product of the captured operands."""

    def drawn(draw: int) -> OperandPair:
        return recipe.pair(product, taken.operands, request.seed + draw, with_plain=request.blame)

    is_random = recipe.is_random(product)
    return measure_product(
        drawn,
        exact,
        call=call,
        draws=request.draws if is_random else 1,
        is_random=is_random,
        blame=request.blame,
        row_of=partial(taken.row_of, product),
    )
