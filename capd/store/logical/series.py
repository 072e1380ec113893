"""Whole tensors: one logical series for all series whose records are parts of the same tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from capd.errors import ContradictoryParts, MissingParts, NoSuchRecord
from capd.store.format.dtypes import stored_type, to_values
from capd.store.logical.identity import Identity, identity_of, is_parameter
from capd.store.logical.joining import (
    JoinPlan,
    ShapedPart,
    absent_places,
    join_plan,
    joined,
    part_of,
    said,
)
from capd.store.logical.layout import PART, TensorLayout, layout_of
from capd.store.logical.parts import (
    HeldPart,
    MissingPart,
    Ordinals,
    PartSeries,
    TensorPlace,
    check_agreement,
    ordinals,
    relative_difference,
    when,
)
from capd.store.logical.ranks import KnownRanks
from capd_client.protocol.key import Key, Moment

if TYPE_CHECKING:
    import torch

__all__ = ["LogicalSeries"]

_NAMED = 4


class LogicalSeries:
    """A tensor of the model as if one rank had captured it: all records of its parts, put together on request.

    Its records are told by their moment, or by an index into `moments`. The time in a moment is not compared, because
    the ranks captured the parts at different times.
    """

    def __init__(
        self, identity: Identity, parts: Sequence[PartSeries], ranks: KnownRanks, *, crops: bool = True
    ) -> None:
        self._identity, self._parts, self._ranks, self._crops = identity, parts, ranks, crops
        self.coordinates: dict[str, int] = dict(identity.coordinates)

    def uncropped(self) -> LogicalSeries:
        """Return the tensor as the job computed with it: padded axes keep their padding."""
        return LogicalSeries(self._identity, self._parts, self._ranks, crops=False)

    @property
    def key(self) -> Key:
        """The key, with the name of the module over all ranks, and the lowest rank that holds a part."""
        return msgspec.structs.replace(
            self._identity.key, rank=min(series.key.rank for series in self._parts)
        )

    @property
    def name(self) -> str:
        """The name of the tensor over all runs: module, operation and tensor, and where it is not the only one."""
        key = self._identity.key
        where = key.module or key.layer_type or "tensor"
        at = "".join(f",{name}={rank}" for name, rank in self._identity.coordinates)
        return f"{where}.{key.operation}.{key.tensor_name}{f'[{at[1:]}]' if at else ''}"

    @property
    def dtype(self) -> str:
        """The dtype of the whole: that of the parts, or the one in which they were added up."""
        return self._sum_dtype if self._layout.reduces else self._identity.dtype

    @property
    def kept(self) -> str:
        """The stored part of each capture, as `Series.kept`: "tensor" if any part keeps its elements."""
        kept = {series.kept for series in self._parts}
        return "tensor" if "tensor" in kept else kept.pop()

    @property
    def part_dtype(self) -> str:
        """The captured dtype of the parts."""
        return self._identity.dtype

    @property
    def _sum_dtype(self) -> str:
        known = stored_type(self._identity.dtype)
        return known.torch if known.encoding == "native" and known.stored.itemsize > 4 else "float32"

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that all parts share, the placements, and how parts were added up (`sum`)."""
        first = self._parts[0].attributes
        ends = tuple(f"_{end}" for end in PART if end != "placement")
        found = {name: value for name, value in first.items() if not name.endswith(ends)}
        for dimension in self._layout.dimensions:
            found[f"{dimension.name}_size"] = dimension.size
        if self._layout.reduces:
            found["sum"] = f"{self.dtype}, added in float64 from {self._identity.dtype}"
        return found

    @property
    def placements(self) -> str:
        """The placements as text, such as "tp S(0) of 2"."""
        return said(self._layout)

    @cached_property
    def _layout(self) -> TensorLayout:
        return layout_of(self._parts[0].attributes)

    @property
    def series(self) -> Sequence[PartSeries]:
        """The series that hold the parts."""
        return self._parts

    @property
    def parts(self) -> list[TensorPlace]:
        """The parts: who captured them, and where they belong. Replicas have the same place."""
        found = []
        for series in self._parts:
            layout = layout_of(series.attributes)
            found.append(TensorPlace(series.key.rank, series.node, _named(layout, layout.place), series.path))
        return sorted(found, key=lambda part: (part.rank, part.path))

    @cached_property
    def _by_moment(self) -> dict[Ordinals, tuple[Moment, list[tuple[PartSeries, int]]]]:
        found: dict[Ordinals, tuple[Moment, list[tuple[PartSeries, int]]]] = {}
        for series in sorted(self._parts, key=lambda series: (series.key.rank, series.path)):
            for number, moment in zip(series.numbers, series.moments, strict=True):
                found.setdefault(ordinals(moment), (moment, []))[1].append((series, number))
        return found

    @cached_property
    def moments(self) -> list[Moment]:
        """The moments at which any part was captured, in order of iteration, micro-batch and call."""
        return sorted(
            (moment for moment, _ in self._by_moment.values()),
            key=lambda moment: tuple(-1 if value is None else value for value in ordinals(moment)),
        )

    def __len__(self) -> int:
        return len(self._by_moment)

    def __repr__(self) -> str:
        return f"<LogicalSeries {self.name} {self.dtype}, {self.placements}, {len(self)} moments>"

    def _held(self, moment: Moment | int) -> tuple[Moment, list[HeldPart]]:
        """Return the records of a moment with their checked layouts, in order of the ranks."""
        if isinstance(moment, int):
            try:
                moment = self.moments[moment]
            except IndexError:
                raise NoSuchRecord(f"{self.name}: there is no moment {moment} of {len(self)}") from None
        known = self._by_moment.get(ordinals(moment))
        if known is None:
            raise NoSuchRecord(f"{self.name}: no rank has a record at {when(moment)}")
        with_elements = {series.key.rank for series, _ in known[1] if series.kept == "tensor"}
        return known[0], [
            self._checked(series, number)
            for series, number in known[1]
            # One rule may have kept the statistics, and another the tensor.
            if series.kept == "tensor" or series.key.rank not in with_elements
        ]

    def _checked(self, series: PartSeries, number: int) -> HeldPart:
        record = series.record(number)
        name = f"{series.path}#{number}"
        if "slice" in record.metadata:
            raise ContradictoryParts(
                f"{self.name}: {name} is only a slice of what the rank held; capture without `slice` to join it"
            )
        try:
            layout = layout_of(record.attributes)
            layout = layout if self._crops else layout._replace(cropped=())
            self._check_place(series, record.attributes)
        except ContradictoryParts as error:
            raise ContradictoryParts(f"{self.name}: {name}: {error}") from None
        if "tensor_class" in record.attributes and not layout.is_whole:
            raise ContradictoryParts(
                f"{self.name}: {name} belongs to a quantised tensor that is split over ranks ({said(layout)}); "
                "data and scales are not joined, so read each rank's with `dequantise=True`"
            )
        return HeldPart(series, number, layout, ShapedPart(name, layout, record.shape))

    def _check_place(self, series: PartSeries, attributes: dict[str, Any]) -> None:
        """Check that a record of another layout than its series was not captured at another place."""
        if attributes == series.attributes:
            return
        here = dict(identity_of(series.key, series.dtype, attributes).coordinates)
        told = self.coordinates.keys() - {"rank"}
        if any(here.get(name, 0) != self.coordinates.get(name, 0) for name in {*here, *told}):
            raise ContradictoryParts(
                f"its rank stood at {here} then, and at {self.coordinates} when the series began; "
                "a job that went on in another layout has other samples there, so select one attempt"
            )

    def missing_at(self, moment: Moment | int) -> list[MissingPart]:
        """Return the places of the whole tensor that no record holds at a moment, the first 16. Reads no element.

        Raises:
            NoSuchRecord: No rank has a record at the moment.
            ContradictoryParts: The attributes of a record are not what docs/logical.md says.
        """
        at, held = self._held(moment)
        return self._absent(at, held)[1]

    @property
    def missing(self) -> list[MissingPart]:
        """The same for all moments."""
        return [one for moment in self.moments for one in self.missing_at(moment)]

    def _absent(self, moment: Moment, held: Sequence[HeldPart]) -> tuple[int, list[MissingPart]]:
        check_agreement(f"{self.name} at {when(moment)}", held)
        layout = held[0].layout
        count, places = absent_places(layout, {one.layout.place for one in held})
        return count, [
            MissingPart(moment, _named(layout, place), self._standing(layout, place)) for place in places
        ]

    def _standing(self, layout: TensorLayout, place: tuple[int, ...]) -> tuple[str, ...]:
        """Return the ranks of the run that stand at a place."""
        wanted = dict(self.coordinates)
        # Only the first copy of a part is named.
        for dimension, part in zip(layout.dimensions, place, strict=True):
            if dimension.placement.kind != "R":
                wanted[dimension.name] = part * dimension.placement.copies
        stage = self._parts[0].attributes.get("pp_rank")
        if type(stage) is int:
            wanted["pp"] = stage
        found = self._ranks.at(wanted) or self._ranks.silent
        return tuple(map(str, found[:_NAMED]))

    def _plan(self, moment: Moment | int) -> tuple[JoinPlan, dict[tuple[int, ...], HeldPart], list[HeldPart]]:
        at, held = self._held(moment)
        check_agreement(f"{self.name} at {when(at)}", held)
        primary: dict[tuple[int, ...], HeldPart] = {}
        for one in held:
            known = primary.setdefault(one.layout.place, one)
            if known is not one:
                self._check_replica(known, one)
        count, missing = self._absent(at, held)
        if count:
            named = "; ".join(map(str, missing[:_NAMED]))
            more = f" and {count - _NAMED} more" if count > _NAMED else ""
            raise MissingParts(
                f"{self.name} at {when(at)}: {count} of {count + len(primary)} parts are missing: {named}{more}; "
                "collect the parts of all nodes, or capture on all ranks (`capd counters` tells what was dropped)"
            )
        try:
            return join_plan({place: one.part for place, one in primary.items()}), primary, held
        except ContradictoryParts as error:
            raise ContradictoryParts(f"{self.name} at {when(at)}: {error}") from None

    def _check_replica(self, known: HeldPart, other: HeldPart) -> None:
        ranks = known.series.key.rank, other.series.key.rank
        names = f"{other.part.name} and {known.part.name}"
        if known.part.shape != other.part.shape:
            raise ContradictoryParts(
                f"{self.name}: {other.part.name} has shape {list(other.part.shape)}, and {known.part.name}, which "
                f"holds the same part, {list(known.part.shape)}"
            )
        if ranks[0] == ranks[1]:
            raise ContradictoryParts(f"{self.name}: {names} are the same part of rank {ranks[0]}")
        # Two ranks that stand at one place of a mesh belong to groups that know nothing of each other.
        alone = [d.rank for d in known.layout.dimensions] == [d.rank for d in other.layout.dimensions]
        if alone and self._tells_samples_apart(known):
            raise ContradictoryParts(
                f"{self.name}: {names} hold the same part, and no attribute says if ranks {ranks[0]} and {ranks[1]} "
                "hold the same values; batch_dims would (docs/logical.md)"
            )

    def _tells_samples_apart(self, held: HeldPart) -> bool:
        """Whether ranks could hold other samples although no dimension says so."""
        return not is_parameter(self._identity.key) and "batch_dims" not in held.series.attributes

    def shape(self, moment: Moment | int) -> tuple[int, ...]:
        """Return the shape of the whole tensor at a moment. Reads no element. Raises as `numpy`."""
        return self._plan(moment)[0].shape

    def numpy(self, moment: Moment | int) -> NDArray[np.generic]:
        """Return the whole tensor at a moment, in stored bits as `Series.numpy`; float32 if parts are added up.

        In memory are the result and one part. If parts are added up, the sum in float64 is, too.

        Raises:
            MissingParts: A part is missing. The message names its ranks.
            ContradictoryParts: The parts do not fit together, or an attribute is not what docs/logical.md says.
            NoSuchRecord: No rank has a record at the moment.
            DamagedRecord: An element cannot be read exactly.
            CapdError: A part keeps only statistics.
        """
        plan, primary, _ = self._plan(moment)
        return self._whole(plan, primary)

    def _whole(self, plan: JoinPlan, primary: Mapping[tuple[int, ...], HeldPart]) -> NDArray[np.generic]:
        if not plan.reduces:
            stored = stored_type(self._identity.dtype).stored
            return joined(plan, lambda place: primary[place].bits(), stored)

        def read(place: tuple[int, ...]) -> NDArray[np.generic]:
            return to_values(primary[place].bits(), self._identity.dtype)

        return joined(plan, read, np.dtype(self._sum_dtype))

    def values(self, moment: Moment | int) -> NDArray[np.generic]:
        """Return the numbers of the whole tensor, as `Series.values`. Raises as `numpy`."""
        return to_values(self.numpy(moment), self.dtype)

    def torch(self, moment: Moment | int) -> torch.Tensor:
        """Return the whole tensor as a CPU tensor of `dtype`, with its own memory. Raises as `numpy`."""
        import torch

        bits, kind = self.numpy(moment), getattr(torch, self.dtype)
        # torch refuses to view the strides of numpy's empty arrays.
        return torch.empty(bits.shape, dtype=kind) if bits.size == 0 else torch.from_numpy(bits).view(kind)

    def spread_at(self, moment: Moment | int) -> float:
        """Return the largest difference between replicas at a moment, relative to their largest magnitude.

        0.0: all are the same bits, or no part has a replica. inf: a NaN is on one of them only. Reads all parts.
        Parts that are added up are compared with the replica that was added. Raises as `numpy`.
        """
        plan, primary, held = self._plan(moment)
        found = 0.0
        for one in held:
            first = primary[one.layout.place]
            if one is not first:
                found = max(found, relative_difference(first.bits(), one.bits(), self._identity.dtype))
        copies = any(one.copy for axes in plan.segments.values() for along in axes for one in along)
        if copies and not plan.reduces:
            whole = self._whole(plan, primary)
            for place, one in primary.items():
                part = one.bits()
                whole_part = part_of(whole, plan.segments[place], part)
                found = max(found, relative_difference(whole_part, part, self._identity.dtype))
        return found

    @property
    def spread(self) -> float:
        """The largest of `spread_at` over all moments."""
        return max(map(self.spread_at, self.moments), default=0.0)


def _named(layout: TensorLayout, place: Iterable[int]) -> dict[str, int]:
    pairs = zip(layout.dimensions, place, strict=True)
    return {dimension.name: part for dimension, part in pairs if dimension.placement.kind != "R"}
