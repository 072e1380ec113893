"""Reads the operands of a call as matrices, and takes some of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from capd.products.captured.calls import CapturedTensor, ProductCall
from capd.replay.recipes import CallOperands
from capd.replay.request import ROWS_STEP
from capd.store.read.series import tensor_of

__all__ = ["ShapeMismatch", "Taken", "chosen_rows", "matrix", "operands_of"]


class ShapeMismatch(Exception):
    """The operands of a call have shapes that do not multiply."""


class Taken(NamedTuple):
    """The operands of a call.

    Attributes:
        operands: The matrices.
        rows: The numbers of the tokens that were taken; None if all were.
        leading: The shape of the tokens as they were captured, such as (batch, sequence).
    """

    operands: CallOperands
    rows: Tensor | None
    leading: tuple[int, ...] = ()

    def row_of(self, product: str, row: int) -> int:
        """Return the number of a product's row in the whole product."""
        return row if self.rows is None or product == "dw" else int(self.rows[row])


def matrix(tensor: CapturedTensor) -> Tensor:
    """Read a tensor with all of its axes but the last one as rows; a weight as [out_features, in_features]."""
    values = tensor_of(tensor.read(), tensor.dtype)
    if values.ndim != 2:
        values = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    return values.t() if tensor.is_transposed else values


def operands_of(call: ProductCall, names: frozenset[str], most_rows: int) -> Iterator[tuple[str, Taken]]:
    """Read the operands that are named, and take at most so many tokens.

    Yields:
        What follows the module's name, ".3" for expert 3 of a call of several experts, and the operands. Experts
        without rows are left out.

    Raises:
        ShapeMismatch: The shapes do not multiply, or an operand has no value.
        capd.io.items.UNREADABLE: An operand cannot be read.
    """
    if call.is_grouped:
        yield from _of_experts(call, names, most_rows)
        return
    found = {name: matrix(call.tensors[name]) for name in sorted(names)}
    tensor = call.tensors["x" if "x" in found else "g"]
    yield "", _taken(found, most_rows, tensor.shape[:-1], is_partial=call.is_partial)


def _taken(found: dict[str, Tensor], most_rows: int, leading: tuple[int, ...], *, is_partial: bool) -> Taken:
    _check(found, is_partial=is_partial)
    tokens = min(found[name].shape[0] for name in ("x", "g") if name in found)
    rows = chosen_rows(tokens, most_rows)
    if rows is not None:
        found |= {name: found[name].index_select(0, rows) for name in ("x", "g") if name in found}
    return Taken(found, rows, leading)


def _of_experts(call: ProductCall, names: frozenset[str], most_rows: int) -> Iterator[tuple[str, Taken]]:
    """Yield the operands of each expert that has rows."""
    found = {name: matrix(call.tensors[name]) for name in sorted(names - {"w"})}
    weights = None
    if "w" in names:
        tensor = call.tensors["w"]
        weights = tensor_of(tensor.read(), tensor.dtype)
        weights = weights.transpose(-1, -2) if tensor.is_transposed else weights
    tokens = max(one.shape[0] for one in found.values())
    for expert, first, last in _rows_of_experts(call, tokens):
        if weights is not None and (weights.ndim != 3 or not 0 <= expert < weights.shape[0]):
            raise ShapeMismatch(f"shapes that do not multiply: w {[*weights.shape]}, expert {expert}")
        if first < last:
            own = {name: one[first:last] for name, one in found.items()}
            own |= {} if weights is None else {"w": weights[expert]}
            yield f".{expert}", _taken(own, most_rows, (last - first,), is_partial=False)


def _rows_of_experts(call: ProductCall, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each expert, and where its rows begin and end."""
    if call.expert is not None:
        yield call.expert, 0, tokens
        return
    ends = [int(end) for end in call.tensors["offsets"].read().reshape(-1).tolist()]
    starts = [0, *ends[:-1]]
    if any(not 0 <= first <= last <= tokens for first, last in zip(starts, ends, strict=True)):
        raise ShapeMismatch(f"offsets {ends[:8]} are no ends of the rows of {tokens} tokens")
    yield from ((expert, first, last) for expert, (first, last) in enumerate(zip(starts, ends, strict=True)))


def chosen_rows(tokens: int, most: int) -> Tensor | None:
    """Return the numbers of at most so many tokens, evenly in whole blocks of `ROWS_STEP`; None for all."""
    if tokens <= most:
        return None
    blocks, wanted = tokens // ROWS_STEP, most // ROWS_STEP
    first = torch.arange(wanted) * blocks // wanted * ROWS_STEP
    return (first[:, None] + torch.arange(ROWS_STEP)).reshape(-1)


def _check(found: dict[str, Tensor], *, is_partial: bool) -> None:
    sizes: dict[str, int] = {}
    for name, axes in (("x", ("tokens", "in")), ("w", ("out", "in")), ("g", ("tokens", "out"))):
        # Slices of input and output gradient may be of different tokens.
        named = (f"{axis} of {name}" if is_partial and axis == "tokens" else axis for axis in axes)
        for axis, size in zip(named, found[name].shape if name in found else (), strict=False):
            if sizes.setdefault(axis, size) != size or not size:
                shapes = ", ".join(f"{each} {[*one.shape]}" for each, one in found.items())
                raise ShapeMismatch(f"shapes that do not multiply: {shapes}")
