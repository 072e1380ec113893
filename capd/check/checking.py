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
    UNKNOWN_CAST,
    parts_of,
    precision_of_product,
    reason_of,
    recipe_of,
)
from capd.check.judging import LEAST_ROWS, ProductJudgement, ProductLimits, judged
from capd.check.precision import Precision
from capd.check.residual import Product
from capd.check.units import CheckUnit, order_of
from capd.io.items import UNREADABLE, Skipped, skipped
from capd.products.captured.calls import CapturedTensor, ProductCall
from capd.replay.operands import ShapeMismatch, matrix, operands_of
from capd.replay.recipes import ReplayRecipe

__all__ = ["CheckOutcome", "Checked", "Finding", "check_calls", "checked_unit"]

# The memory that a check takes, by the bytes of its tensors: float32 of bfloat16, and copies of blocks.
_WORK = 5
_SHAPES = "shapes that do not multiply"
# The operands of the micro-batches over which a gradient may be summed are in memory together.
_MOST_SUMMED = 1 << 30


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

    def add(self, unit: CheckUnit, other: CheckOutcome) -> None:
        """Add the outcome of a unit."""
        self.calls += len(unit.calls)
        self.findings += other.findings
        self.left_out += other.left_out
        self.skipped += other.skipped

    @property
    def beyond(self) -> list[Finding]:
        """The products beyond a limit, in the order of execution: forward by layer, then backward."""
        return sorted((one for one in self.findings if one.judgement.is_beyond), key=_executed)


def _executed(one: Finding) -> tuple[float, ...]:
    place, is_forward = one.call.place, one.product in ("y", "o")
    # What is in no layer is a head, which comes last.
    layer = place["layer"] if type(place["layer"]) is int else math.inf
    return (*order_of(one.call)[:3], not is_forward, layer if is_forward else -layer)


def check_calls(
    units: Sequence[CheckUnit], limits: ProductLimits, threads: int
) -> Iterator[tuple[CheckUnit, CheckOutcome]]:
    """Check units in threads, ahead of the consumer, within 128 MiB or one unit. Yield them in order."""
    with worker_threads(threads, "check") as pool:
        for unit, future in ahead(
            units,
            lambda unit: pool.submit(checked_unit, unit, limits),
            lambda unit: _WORK * unit.nbytes,
            AHEAD_NBYTES,
        ):
            yield unit, future.result()


@torch.no_grad()
def checked_unit(unit: CheckUnit, limits: ProductLimits) -> CheckOutcome:
    """Check all products of the calls of a unit."""
    found = CheckOutcome()
    for call in unit.calls:
        if "o" in call.tensors:
            _check_attention(call, limits, found)
        for product in ("y", "dx"):
            if product in call.tensors:
                _check(product, call, [call], limits, found)
        if "dw" in call.tensors:
            _check("dw", call, _calls_of_gradient(call, unit.calls), limits, found, unit.later)
    return found


def _calls_of_gradient(call: ProductCall, calls: Sequence[ProductCall]) -> list[ProductCall]:
    """Return the calls over which a weight's gradient is the sum: one, if each call has its own gradient."""
    own = [one for one in calls if "dw" in one.tensors]
    return [call] if len(own) > 1 else [one for one in calls if "x" in one.tensors or "g" in one.tensors]


def _check(
    product: str,
    call: ProductCall,
    calls: Sequence[ProductCall],
    limits: ProductLimits,
    found: CheckOutcome,
    later: Sequence[ProductCall] = (),
) -> None:
    title = TITLES[product]
    try:
        findings = _findings(product, call, calls, limits)
        if later and not isinstance(findings, str) and any(one.judgement.is_beyond for one in findings):
            summed = _findings_of_sum(call, [*calls, *later], limits)
            if isinstance(summed, str) or not any(one.judgement.is_beyond for one in summed):
                findings = summed
        if isinstance(findings, str):
            found.left_out[f"{title}: {findings}"] += 1
            return
        for one in findings:
            apart = _apart(one, calls) if one.judgement.is_beyond else None
            if apart is None:
                found.findings.append(one)
            else:
                found.left_out[f"{title}: {apart}"] += 1
    except ShapeMismatch:
        found.left_out[f"{title}: {_SHAPES}"] += 1
    except UNREADABLE as error:
        found.skipped.append(skipped(call.tensors[product].name, error, damaged=True))


def _findings_of_sum(
    call: ProductCall, calls: Sequence[ProductCall], limits: ProductLimits
) -> list[Finding] | str:
    """Judge a gradient that may be the sum over several micro-batches, or return why it cannot be compared."""
    operands = (one for each in calls for name, one in each.tensors.items() if name in OPERANDS["dw"])
    too_large = sum(one.nbytes for one in operands) > _MOST_SUMMED
    found = _findings("dw", call, calls, limits) if not too_large else "their operands take more than 1 GiB"
    return f"it may be the sum over several micro-batches: {found}" if isinstance(found, str) else found


def _findings(
    product: str, call: ProductCall, calls: Sequence[ProductCall], limits: ProductLimits
) -> list[Finding] | str:
    """Judge a product, of several experts each one; or return why it cannot be compared."""
    reason = reason_of(product, calls)
    if reason is not None:
        return reason
    recipe, precision = recipe_of(calls, product), precision_of_product(product, calls)
    if isinstance(recipe, str):
        return recipe
    if precision is None:
        return UNKNOWN_CAST
    if call.is_grouped and len(calls) > 1:
        return "it is the sum over several calls of experts"
    may_have_bias = product == "y" and _may_have_bias(call)
    parts = parts_of(call.tensors[product])
    return [
        Finding(
            call,
            product,
            suffix,
            judged(one, precision, limits, parts=parts, may_have_bias=may_have_bias),
            leading,
        )
        for suffix, one, leading in _products(product, call, calls, precision, recipe)
    ]


def _apart(found: Finding, calls: Sequence[ProductCall]) -> str | None:
    """Return why a product beyond a limit may be sound all the same, None if nothing speaks for it.

    Ranks may have different copies of an operand, so that it is not that of each rank's product. This reads all copies.
    """
    precision = precision_of_product(found.product, calls)
    for call in calls:
        for name in OPERANDS[found.product]:
            one = call.tensors[name]
            if one.spread is not None and precision is not None and one.spread() > precision.eps:
                return f"{NAMES[name]}: ranks have different copies of it; check each rank (--rank)"
    if found.product == "y" and found.judgement.rows.of < LEAST_ROWS and _may_have_bias(found.call):
        return "one row does not tell an error from a bias, and no bias was captured"
    return None


def _may_have_bias(call: ProductCall) -> bool:
    """Whether a bias may have been added to the product: none was captured, and nothing says that there is none.

    A function that got a bias on each rank, before the products of the ranks are added up, adds it too often.
    """
    y = call.tensors["y"]
    told = y.metadata.get("use_bias")
    return "bias" not in call.tensors and told is not False and not (told is True and parts_of(y) > 1)


def _products(
    product: str,
    call: ProductCall,
    calls: Sequence[ProductCall],
    precision: Precision,
    recipe: ReplayRecipe | None,
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
