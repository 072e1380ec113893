"""The parts of a whole tensor as records hold them, those that are missing, and how far replicas are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from capd.errors import CapdError, ContradictoryParts
from capd.store.format.dtypes import to_values
from capd.store.logical.joining import ShapedPart, said
from capd.store.logical.layout import TensorLayout
from capd_client.protocol.key import ORDINALS, Key, Moment

__all__ = [
    "HeldPart", "MissingPart", "Ordinals", "PartSeries", "TensorPlace", "check_agreement", "ordinals",
    "relative_difference", "when",
]  # fmt: skip

Ordinals = tuple[int | None, ...]


class PartRecord(Protocol):
    """A record that holds a part of a tensor."""

    shape: tuple[int, ...]
    metadata: dict[str, Any]
    attributes: dict[str, Any]


class PartSeries(Protocol):
    """A series whose records hold parts of tensors (`capd.store.read.series.Series`)."""

    @property
    def path(self) -> str: ...
    @property
    def key(self) -> Key: ...
    @property
    def dtype(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def kept(self) -> str: ...
    @property
    def attributes(self) -> dict[str, Any]: ...
    @property
    def numbers(self) -> Sequence[int]: ...
    @property
    def moments(self) -> list[Moment]: ...
    def record(self, number: int) -> Any: ...
    def elements(self, number: int, region: Any = ...) -> NDArray[np.generic]: ...


class TensorPlace(NamedTuple):
    """One part of a logical series: the rank and node that captured it, and its part of every placed dimension."""

    rank: int
    node: str
    place: dict[str, int]
    path: str


class MissingPart(NamedTuple):
    """A place of a whole tensor that no record holds, and the ranks that stand there, as text."""

    moment: Moment
    place: dict[str, int]
    ranks: tuple[str, ...]

    def __str__(self) -> str:
        at = ", ".join(f"{name} {part}" for name, part in self.place.items())
        return f"{at} ({' or '.join(self.ranks)})" if self.ranks else at


class HeldPart(NamedTuple):
    """A record that holds a part: its series, its number there, its layout and its shape."""

    series: PartSeries
    number: int
    layout: TensorLayout
    part: ShapedPart

    def bits(self) -> NDArray[np.generic]:
        """Return the stored bits of the part.

        Raises:
            CapdError: Only statistics were kept.
            DamagedRecord: An element cannot be read exactly.
        """
        if self.series.kept != "tensor":
            raise CapdError(
                f"{self.part.name}: only statistics were kept (mode or policy stats), no elements"
            )
        return self.series.elements(self.number)


def check_agreement(where: str, held: Sequence[HeldPart]) -> None:
    """Check that all parts say the same of the whole tensor.

    Raises:
        ContradictoryParts: Two of them do not. The message begins with `where`, and names both.
    """
    for one in held:
        if one.layout.description != held[0].layout.description:
            raise ContradictoryParts(
                f"{where}: {one.part.name} is placed as {said(one.layout)}, and {held[0].part.name} as "
                f"{said(held[0].layout)}"
            )


def ordinals(moment: Moment) -> Ordinals:
    """Return what tells the records of one rank apart. The time is left out: ranks capture at different times."""
    return tuple(getattr(moment, name) for name in ORDINALS)


def when(moment: Moment) -> str:
    """Return a moment as short text."""
    known = ((name, getattr(moment, name)) for name in ORDINALS)
    return ", ".join(f"{name} {value}" for name, value in known if value) or "iteration 0"


def relative_difference(bits: NDArray[np.generic], others: NDArray[np.generic], dtype: str) -> float:
    """Return the largest difference of two tensors in stored bits, relative to the largest magnitude of the first.

    0.0 if the bits are the same; inf if a NaN or an infinity is in one of them only.
    """
    if bits.tobytes() == others.tobytes():
        return 0.0
    one, other = (to_values(stored, dtype).astype(np.float64) for stored in (bits, others))
    with np.errstate(invalid="ignore"):
        apart = np.where(one == other, 0.0, np.abs(one - other))
    apart[np.isnan(one) & np.isnan(other)] = 0.0
    finite = np.abs(one[np.isfinite(one)])
    largest = float(finite.max(initial=0.0))
    if not np.isfinite(apart).all() or (largest == 0.0 and apart.any()):
        return float("inf")
    return float(apart.max(initial=0.0) / largest) if largest else 0.0
