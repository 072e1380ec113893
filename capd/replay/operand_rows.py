"""An operand of a product in a recipe, of which some rows at a time are transformed and quantised.

So an operand takes no memory before it is multiplied, and what is worked on stays in the caches. The last axis is the
contraction, along which blocks and transforms run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from capd.replay.freed_memory import return_freed
from capd_client.emulation.quantise import is_random, spec_of_word, transform_of_word
from capd_client.formats.encoding import extremes_of, quantised
from capd_client.formats.spec import Spec
from capd_client.formats.transforms.hadamard import Signs, hadamard

__all__ = ["PlainRows", "QuantisedRows", "Rows", "slabs"]

Rows = Callable[[slice], Tensor]
"""Returns some rows of an operand, float32."""

# So many values and the copies that a quantiser makes of them stay in the caches.
_SLAB_VALUES = 1 << 18
# Transformed rows of more values are made again after a look at all of them, and not kept.
_KEPT_VALUES = 1 << 22
# Copies of so many slabs may leave holes of as many MiB in the heap.
_SLABS_BETWEEN_RETURNS = 8


class PlainRows:
    """The rows of an operand before its quantiser, and after the transform of its product.

    Attributes:
        raw: The operand [rows, n], contiguous or turned.
        dtype: The dtype of the rows: bfloat16 if the transform is computed in it or if it is wanted, else float32.
        is_transformed: Whether rows are other than those of `raw`.
        step: Rows must be asked for in whole multiples of this number.
    """

    def __init__(
        self, raw: Tensor, turn: str, seed: int, *, before: str = "", takes_bfloat16: bool = False
    ) -> None:
        """Draw the signs of the transform.

        Args:
            raw: The operand.
            turn: The word of the transform along the contraction. "" for none.
            seed: The seed of the signs, which is that of both operands.
            before: The word of a transform of the rows along the other axis, which comes first.
            takes_bfloat16: Whether bfloat16 that is not transformed stays so.
        """
        self.raw, self.is_transformed = raw, bool(turn or before)
        self._turn = _turn(turn, seed) if turn else None
        self._before = _turn(before, seed) if before else None
        self.step = self._before[0] if self._before else 1
        # Where the result is rounded to bfloat16, the transform itself is computed in it, as TransformerEngine does.
        is_low = takes_bfloat16 if self._turn is None else self._turn[2] is not None
        is_low &= raw.dtype == torch.bfloat16 and not before
        self.dtype = torch.bfloat16 if is_low else torch.float32

    def __call__(self, wanted: slice) -> Tensor:
        """Return some rows, contiguous."""
        values = self.raw[wanted]
        if not values.is_contiguous():
            # torch turns a whole matrix of float32 several times as fast as a part of one, or as 16 bits.
            values = values.t().to(torch.float32).contiguous().t().contiguous()
        values = values.to(self.dtype)
        for turn, axis in ((self._before, 0), (self._turn, -1)):
            if turn is not None:
                size, signs, rounded = turn
                values = hadamard(values, size, axis=axis, signs=signs, round_to=rounded).to(self.dtype)
        return values

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return all rows, with the strides of `raw` if they are not transformed."""
        if not self.is_transformed:
            return self.raw.to(dtype)
        found = torch.empty(self.raw.shape, dtype=dtype)
        for rows in slabs(0, self.raw.shape[0], self.raw.shape[1], self.step):
            found[rows] = self(rows)
        return found


class QuantisedRows:
    """The rows of an operand after its quantiser, float32. Those that are drawn must be asked for once, in order."""

    def __init__(self, plain: PlainRows, word: str, seed: int) -> None:
        """Look at all rows if the format has a scale of all.

        Args:
            plain: The rows before the quantiser.
            word: The word of the format. "" for none.
            seed: The seed of its random bits.
        """
        self._plain: Rows = plain
        self._shape = plain.raw.shape
        self._spec: Spec | None = spec_of_word(word, -1) if word else None
        self._generator = torch.Generator().manual_seed(seed) if is_random(word) else None
        self._extremes: Tensor | None = None
        self._step = plain.step
        self._whole: Tensor | None = None
        if self._spec is None:
            return
        if isinstance(self._spec.block, tuple):
            self._step = math.lcm(self._step, self._spec.block[0])
        if not self._spec.is_scaled and self._spec.is_random:
            # Its quantiser draws several times for each tensor.
            self._whole = self._quantised(slice(None))
        elif self._spec.has_scale_of_all:
            parts = iter([plain.raw if plain.raw.is_contiguous() else plain.raw.t()])
            if plain.is_transformed:
                is_kept = plain.raw.numel() <= _KEPT_VALUES
                self._plain = plain.whole(plain.dtype).__getitem__ if is_kept else plain
                parts = map(self._plain, slabs(0, self._shape[0], self._shape[1], plain.step))
            self._extremes = extremes_of(parts)

    def __call__(self, wanted: slice) -> Tensor:
        """Return some rows, contiguous."""
        first, last, _ = wanted.indices(self._shape[0])
        if self._whole is None and (first % self._step or (last % self._step and last != self._shape[0])):
            # Blocks of several rows would be cut.
            self._whole = self(slice(None))
        if self._whole is not None:
            return self._whole[wanted]
        parts = [*slabs(first, last, self._shape[1], self._step)]
        if len(parts) == 1:
            return self._quantised(parts[0])
        found = torch.empty(last - first, self._shape[1])
        for rows in parts:
            found[rows.start - first : rows.stop - first] = self._quantised(rows)
        return found

    def _quantised(self, rows: slice) -> Tensor:
        values = self._plain(rows)
        if self._spec is None:
            return values.to(torch.float32)
        own = values.to(torch.float32) if self._spec.is_scaled else values
        return quantised(own, self._spec, self._generator, self._extremes).to(torch.float32)


def _turn(word: str, seed: int) -> tuple[int, Signs, torch.dtype | None]:
    """Return the size of a transform, its signs, and the dtype to which results are rounded."""
    size, signs, rounded = transform_of_word(word)
    if not is_random(word):
        return size, signs, rounded
    drawn = torch.randint(2, (size,), generator=torch.Generator().manual_seed(seed))
    return size, drawn.mul_(2).sub_(1).to(torch.float32), rounded


def slabs(first: int, last: int, columns: int, step: int = 1) -> Iterator[slice]:
    """Yield ranges of rows whose values stay in the caches, whole multiples of `step` but for the last one.

    After some of them, the memory that their copies left in the heap returns to the system.
    """
    rows = max(step, _SLAB_VALUES // max(1, columns) // step * step)
    for number, start in enumerate(range(first, last, rows), 1):
        yield slice(start, min(last, start + rows))
        if number % _SLABS_BETWEEN_RETURNS == 0:
            return_freed()
