"""Checks the products of calls: reads the tensors of one micro-batch of one module, and judges each product."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from capd.ahead import AHEAD_NBYTES, ahead, worker_threads
from capd.check.attention import attention_reason, judged_attention
from capd.check.comparable import (
    NAMES,
    OPERANDS,
    TITLES,
    parts_of,
    precision_of_product,
    reason_of,
    recipe_of,
)
from capd.check.judging import ProductJudgement, ProductLimits, judged
from capd.check.precision import Precision
from capd.check.residual import Product
from capd.io.items import UNREADABLE, Skipped, skipped
from capd.products.captured.calls import CapturedTensor, ProductCall, ProductCalls, sampled
from capd.replay.operands import ShapeMismatch, matrix, operands_of
from capd.replay.recipes import ReplayRecipe

__all__ = ["CheckOutcome", "Checked", "Finding", "check_calls", "checked_units", "units_of"]

# The memory that a check takes, by the bytes of its tensors: float32 of bfloat16, and copies of blocks.
_WORK = 5
_SHAPES = "shapes that do not multiply"

Unit = Sequence[ProductCall]
"""The calls of a module in one micro-batch, whose weight has one gradient."""


class Finding(NamedTuple):
    """A checked product: its call, its name in `TITLES`, the expert's suffix or "", and what was found."""

    call: ProductCall
    product: str
    suffix: str
    judgement: ProductJudgement
    leading: tuple[int, ...]


@dataclass(slots=True)
class CheckOutcome:
    """What the check of some calls found.

    Attributes:
        findings: The checked products.
        left_out: The captured products that cannot be compared, by reason.
        skipped: Tensors that could not be read.
    """

    findings: list[Finding] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(slots=True)
class Checked(CheckOutcome):
    """The same of a whole run. `calls`: the calls of which any tensor was captured."""

    calls: int = 0

    def add(self, unit: Unit, other: CheckOutcome) -> None:
        """Add the outcome of a unit."""
        self.calls += len(unit)
        self.findings += other.findings
        self.left_out += other.left_out
        self.skipped += other.skipped

    @property
    def beyond(self) -> list[Finding]:
        """The products beyond a limit, in the order of execution: forward by layer, then backward."""
        return sorted((one for one in self.findings if one.judgement.is_beyond), key=_executed)


def units_of(calls: ProductCalls, share: float) -> list[Unit]:
    """Return the calls by module and micro-batch, in order of iteration and micro-batch. Of a module, a share."""
    found: list[Unit] = []
    for module in calls.by_module(("x", "g", "y", "dx", "dw", "q", "o")):
        units: dict[tuple[object, ...], list[ProductCall]] = {}
        for call in module:
            place = tuple(call.place[name] for name in ("attempt", "iteration", "micro_batch"))
            units.setdefault(place, []).append(call)
        found += sampled(list(units.values()), share)
    return sorted(found, key=lambda unit: _order(unit[0]))


def _order(call: ProductCall) -> tuple[int, ...]:
    return tuple(
        value if type(value) is int else -1
        for value in (call.place[name] for name in ("attempt", "iteration", "micro_batch", "layer"))
    )


def _executed(one: Finding) -> tuple[float, ...]:
    place, is_forward = one.call.place, one.product in ("y", "o")
    # What is in no layer is a head, which comes last.
    layer = place["layer"] if type(place["layer"]) is int else math.inf
    return (*_order(one.call)[:3], not is_forward, layer if is_forward else -layer)


def check_calls(
    units: Sequence[Unit], limits: ProductLimits, threads: int
) -> Iterator[tuple[Unit, CheckOutcome]]:
    """Check units in threads, ahead of the consumer, within 128 MiB or one unit. Yield them in order."""
    with worker_threads(threads, "check") as pool:

        def nbytes(unit: Unit) -> int:
            return _WORK * sum(one.nbytes for call in unit for one in call.tensors.values())

        for unit, future in ahead(
            units, lambda unit: pool.submit(checked_units, unit, limits), nbytes, AHEAD_NBYTES
        ):
            yield unit, future.result()


@torch.no_grad()
def checked_units(unit: Unit, limits: ProductLimits) -> CheckOutcome:
    """Check all products of the calls of a unit."""
    found = CheckOutcome()
    for call in unit:
        if "o" in call.tensors:
            _check_attention(call, limits, found)
        for product in ("y", "dx"):
            if product in call.tensors:
                _check(product, call, [call], limits, found)
        if "dw" in call.tensors:
            _check("dw", call, _calls_of_gradient(call, unit), limits, found)
    return found


def _calls_of_gradient(call: ProductCall, unit: Unit) -> list[ProductCall]:
    """Return the calls over which a weight's gradient is the sum: one, if each call has its own gradient."""
    own = [one for one in unit if "dw" in one.tensors]
    return [call] if len(own) > 1 else [one for one in unit if "x" in one.tensors or "g" in one.tensors]


def _check(product: str, call: ProductCall, calls: Unit, limits: ProductLimits, found: CheckOutcome) -> None:
    title = TITLES[product]
    reason = reason_of(product, calls)
    recipe = recipe_of(calls, product) if reason is None else None
    if isinstance(recipe, str):
        reason = recipe
    precision = precision_of_product(product, calls)
    if reason is not None or precision is None or isinstance(recipe, str):
        found.left_out[f"{title}: {reason}"] += 1
        return
    try:
        for suffix, one, leading in _products(product, call, calls, precision, recipe):
            judgement = judged(
                one, precision, limits,
                parts=parts_of(call.tensors[product]), may_have_bias=product == "y" and _may_have_bias(call),
            )  # fmt: skip
            apart = _apart(product, calls, precision) if judgement.is_beyond else None
            if apart is not None:
                found.left_out[f"{title}: {apart}"] += 1
                continue
            found.findings.append(Finding(call, product, suffix, judgement, leading))
    except ShapeMismatch:
        found.left_out[f"{title}: {_SHAPES}"] += 1
    except UNREADABLE as error:
        found.skipped.append(skipped(call.tensors[product].name, error, damaged=True))


def _apart(product: str, calls: Unit, precision: Precision) -> str | None:
    """Return which operand the ranks have different copies of, so that it is not that of each rank's product.

    It is asked for products beyond a limit alone, because it reads all copies.
    """
    for call in calls:
        for name in OPERANDS[product]:
            one = call.tensors[name]
            if one.spread is not None and one.spread() > precision.eps:
                return f"{NAMES[name]}: ranks have different copies of it; check each rank (--rank)"
    return None


def _may_have_bias(call: ProductCall) -> bool:
    """Whether a bias may have been added to the product: none was captured, and nothing says that there is none.

    A function that got a bias on each rank, before the products of the ranks are added up, adds it too often.
    """
    y = call.tensors["y"]
    told = y.metadata.get("use_bias")
    return "bias" not in call.tensors and told is not False and not (told is True and parts_of(y) > 1)


def _products(
    product: str, call: ProductCall, calls: Unit, precision: Precision, recipe: ReplayRecipe | None
) -> Iterator[tuple[str, Product, tuple[int, ...]]]:
    """Yield the suffix, the product and the leading shape of its rows; of several experts, one for each."""
    if call.is_grouped:
        yield from _of_experts(product, call, precision)
        return
    names = OPERANDS[product]
    each = [{name: matrix(one.tensors[name]) for name in names} for one in calls]
    if recipe is not None:
        pairs = [recipe.pair(product, operands, 0) for operands in each]
        pairs = pairs if product == "dw" else pairs[:1]
        a, b = (
            torch.cat([pair.a(slice(None)) for pair in pairs], -1),
            torch.cat([pair.b for pair in pairs], 0),
        )
        cast = torch.float32
    else:
        joined = {
            name: torch.cat([one[name] for one in each]) if len(each) > 1 else each[0][name] for name in names
        }
        a, b = _turned(product, joined[names[0]], joined[names[1]])
        cast = precision.cast
    tensor = call.tensors[product]
    c = matrix(tensor)
    _must_multiply(a, b, c)
    yield (
        "",
        Product(a, b, c, precision.computed_in, cast, _bias(call, product, c, precision)),
        tensor.shape[:-1],
    )


def _bias(call: ProductCall, product: str, c: Tensor, precision: Precision) -> Tensor | None:
    if product != "y" or "bias" not in call.tensors:
        return None
    bias = matrix(call.tensors["bias"]).reshape(-1)
    if len(bias) != c.shape[1]:
        raise ShapeMismatch
    return precision.operand(bias)


def _of_experts(
    product: str, call: ProductCall, precision: Precision
) -> Iterator[tuple[str, Product, tuple[int, ...]]]:
    if call.is_partial or ("offsets" not in call.tensors and call.expert is None):
        raise ShapeMismatch("which rows are of which expert is not known")
    names = frozenset(OPERANDS[product]) | ({product} if product != "dw" else set())
    gradient: Tensor | None = None
    if product == "dw":
        gradient = _stacked(call.tensors["dw"])
    for suffix, taken in operands_of(call, names, 1 << 62):
        own = taken.operands
        a, b = _turned(product, own[OPERANDS[product][0]], own[OPERANDS[product][1]])
        c = own[product] if gradient is None else gradient[int(suffix.removeprefix("."))]
        _must_multiply(a, b, c)
        yield suffix, Product(a, b, c, precision.computed_in, precision.cast), (c.shape[0],)


def _stacked(tensor: CapturedTensor) -> Tensor:
    """Read the gradient of the weights of all experts, [experts, out_features, in_features]."""
    from capd.store.read.series import tensor_of

    values = tensor_of(tensor.read(), tensor.dtype)
    if values.ndim != 3:
        raise ShapeMismatch
    return values.transpose(-1, -2) if tensor.is_transposed else values


def _turned(product: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return operands [tokens, …] and weights as [rows, n] and [n, columns]: Y = X Wᵀ, dX = G W, dW = Gᵀ X."""
    if product == "y":
        return a, b.t()
    return (a.t(), b) if product == "dw" else (a, b)


def _must_multiply(a: Tensor, b: Tensor, c: Tensor) -> None:
    if a.shape[1] != b.shape[0] or c.shape != (a.shape[0], b.shape[1]) or not c.numel():
        raise ShapeMismatch


def _check_attention(call: ProductCall, limits: ProductLimits, found: CheckOutcome) -> None:
    reason = attention_reason(call)
    if reason is None:
        try:
            result = judged_attention(call, limits)
        except UNREADABLE as error:
            found.skipped.append(skipped(call.name, error, damaged=True))
            return
        if not isinstance(result, str):
            shape = call.tensors["q"].shape
            found.findings.append(Finding(call, "o", "", result, shape[:-1]))
            return
        reason = result
    found.left_out[f"O: {reason}"] += 1
