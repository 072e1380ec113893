"""The captured products of a call against those that the recipe of its job gives, computed as the job does.

They are computed by the functions of the emulation and by autograd, in the captured dtype and shape. So on a CPU of the
job's kind, with its number of threads, captured products are reproduced to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from capd.products.captured.calls import ProductCall
from capd.replay.operands import Taken, matrix
from capd.replay.recipes import ReplayRecipe
from capd.replay.sums import CapturedDistance
from capd.replay.ulps import DTYPES, captured_distance

__all__ = ["captured_distances"]

# With fewer rows, another difference could look like a bias.
_LEAST_ROWS = 8
_BLOCK_ROWS = 256


def captured_distances(
    call: ProductCall, taken: Taken, recipe: ReplayRecipe, products: Sequence[str]
) -> Mapping[str, CapturedDistance]:
    """Return the distance of each captured product of these names.

    It is empty if the recipe is not that of the job or rounds at random, and for slices, some of the tokens, or tensors
    that were put together.

    Raises:
        capd.io.items.UNREADABLE: A product cannot be read.
    """
    captured = {
        one: call.tensors[one] for one in products if one in call.tensors and not recipe.is_random(one)
    }
    captured = {name: one for name, one in captured.items() if one.rows is None and not one.no_operand}
    if any(one.is_whole for one in call.tensors.values()):
        # The sum of the ranks' products is rounded otherwise.
        return {}
    if not captured or taken.rows is not None or call.is_partial or not recipe.is_of(call):
        return {}
    found = {}
    for name, values in _computed(taken, recipe, with_gradients=bool({"dx", "dw"} & {*captured})).items():
        dtype = str(values.dtype).removeprefix("torch.")
        if name in captured and captured[name].dtype == dtype and values.dtype in DTYPES:
            theirs = matrix(captured[name])
            if theirs.shape == values.shape:
                found[name] = captured_distance(values, theirs.contiguous())
                if name == "y" and found[name].max_ulp and _is_biased(values, theirs):
                    found[name] = CapturedDistance(biased=1)
    return found


def _computed(taken: Taken, recipe: ReplayRecipe, *, with_gradients: bool) -> Mapping[str, Tensor]:
    """Return the products of a call as matrices, in the dtype in which it multiplies; none without x and w."""
    x, w, g = (taken.operands.get(name) for name in ("x", "w", "g"))
    if (
        x is None
        or w is None
        or x.dtype != w.dtype
        or (with_gradients and g is not None and g.dtype != x.dtype)
    ):
        return {}
    with torch.enable_grad():
        x, w = (one.detach().requires_grad_(with_gradients) for one in (x, w))
        y = recipe.linear(x.reshape(*taken.leading, x.shape[-1]), w)
        found = {"y": y.detach().reshape(-1, y.shape[-1])}
        if with_gradients and g is not None:
            found["dx"], found["dw"] = torch.autograd.grad(y, (x, w), g.reshape(y.shape))
    return found


def _is_biased(values: Tensor, captured: Tensor) -> bool:
    """Return whether the products differ by the same numbers in all rows, within the rounding of both.

    The rest has at most half the energy of these numbers, and no more than one step of the dtype has.
    """
    rows, columns = values.shape
    if rows < _LEAST_ROWS:
        return False
    total, squares = torch.zeros(columns, dtype=torch.float64), 0.0
    energy = 0.0
    for first in range(0, rows, _BLOCK_ROWS):
        some = slice(first, first + _BLOCK_ROWS)
        a, b = values[some].to(torch.float64), captured[some].to(torch.float64)
        d = b - a
        total += d.sum(0)
        squares += float((d * d).sum())
        energy += float((a * a).sum() + (b * b).sum())
    common = float((total * total).sum()) / rows
    step = torch.finfo(values.dtype).eps
    return squares - common <= min(0.5 * common, step * step * energy)
