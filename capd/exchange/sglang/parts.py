"""Which tensors of an export have parts whose places are known, so that the comparator may join them."""

from __future__ import annotations

from typing import NamedTuple

from capd.exchange.sglang.dims import ParallelPlace

__all__ = ["KnownParts", "NamedTensor"]


class NamedTensor(NamedTuple):
    """A tensor as its parts' files name it: module, operation and tensor; layer; quant type; tags; dimensions."""

    name: str
    layer: int | None
    quant_type: str
    tags: tuple[tuple[str, int], ...]
    ndim: int


class KnownParts:
    """The parts of all tensors of an export. Each is added before the first question.

    The parts of a tensor are related if each has a place of its own in the same dimensions. A tensor of one rank is.
    Two ranks in one place, as without any placement, hold what nobody knows: copies, parts, or other samples.
    """

    def __init__(self) -> None:
        # By tensor, the rank in each place.
        self._ranks: dict[NamedTensor, dict[tuple[int, ...], int]] = {}
        self._dims: dict[NamedTensor, str] = {}
        self._unrelated: set[NamedTensor] = set()

    def add(self, tensor: NamedTensor, place: ParallelPlace, rank: int) -> None:
        """Note that a rank has a part of a tensor in a place."""
        held = self._ranks.setdefault(tensor, {}).setdefault(tuple(place.info.values()), rank)
        said = " ".join((place.dims, *place.info))
        if held != rank or self._dims.setdefault(tensor, said) != said:
            self._unrelated.add(tensor)

    def are_related(self, tensor: NamedTensor) -> bool:
        """Whether the comparator may join the parts of a tensor."""
        return tensor not in self._unrelated
