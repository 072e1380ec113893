"""The replay of calls: each is read once, and each of its products is computed in every recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from capd.io.items import UNREADABLE, Skipped, skipped
from capd.replay.calls import ReplayCall
from capd.replay.captured import captured_distances
from capd.replay.exact_product import ExactProduct, exact_product
from capd.replay.groups import ReplayGroups, Value
from capd.replay.operands import ShapeMismatch, Taken, operands_of
from capd.replay.product_sums import OperandPair, measure_product
from capd.replay.recipes import OPERANDS_OF, ReplayRecipe
from capd.replay.request import TITLES, ReplayRequest
from capd.replay.sums import ProductSums

__all__ = ["Replayed", "replay", "replay_call", "replay_recipe"]


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
    calls: Sequence[ReplayCall], request: ReplayRequest, replayed: Replayed
) -> Iterator[Skipped | ReplayCall]:
    """Replay calls one after the other, and add them to `replayed`. The memory is that of one call.

    Yields:
        Each call after it was added or left out, or the reason why it was skipped.
    """
    for call in calls:
        replayed.found += 1
        possible = []
        for product in request.products:
            reason = call.reason(product, OPERANDS_OF[product])
            if reason is None:
                possible.append(product)
            else:
                replayed.left_out[f"{TITLES[product]}: {reason}"] += 1
        if not possible:
            yield call
            continue
        try:
            parts = list(_replayed_parts(call, possible, request))
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
        replayed.replayed += 1
        replayed.ranks.add(call.place["rank"])
        replayed.of_some_rows += any(of_some for _, of_some, _ in parts)
        replayed.partial += call.is_partial
        yield call


def _replayed_parts(
    call: ReplayCall, products: Sequence[str], request: ReplayRequest
) -> Iterator[tuple[str, bool, Mapping[str, Mapping[str, ProductSums]]]]:
    """Yield the expert's suffix or "", whether some tokens were taken, and the sums by product and recipe."""
    names = frozenset(name for one in products for name in OPERANDS_OF[one])
    for suffix, taken in operands_of(call, names, request.rows):
        found = {product: replay_call(taken, product, request, call.name + suffix) for product in products}
        for recipe in request.recipes if not call.is_grouped else ():
            for product, distance in captured_distances(call, taken, recipe, products).items():
                found[product][recipe.name].captured = distance
        yield suffix, taken.rows is not None, found


def replay_call(
    taken: Taken, product: str, request: ReplayRequest, call: str = ""
) -> Mapping[str, ProductSums]:
    """Return the sums of one product of a call by the recipe's name. `call` names the call in messages."""
    exact = exact_product(*ReplayRecipe.plain(product, taken.operands))
    return {one.name: replay_recipe(one, taken, product, exact, request, call) for one in request.recipes}


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
        return recipe.pair(product, taken.operands, request.seed + draw)

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
