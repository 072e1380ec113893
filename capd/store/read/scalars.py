"""The scalars of a run as NumPy arrays: single numbers that a rank recorded beside the tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capd.store.catalog.rows import SeriesRow
from capd.store.read.elements import ReadTools
from capd.store.read.series import Series, import_extra
from capd.store.read.source import RunNode
from capd_client.protocol.key import Moment

__all__ = ["Scalar", "ScalarRows", "read_scalar", "scalar_rows"]

# One scalar of one rank. After a restart, the rank may have continued on another node.
ScalarRows = Sequence[tuple[RunNode, SeriesRow]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scalar:
    """What one rank recorded under one name, in the order of iteration, micro-batch and call.

    Attributes:
        name: The name, as in "loss".
        rank: The rank.
        iterations, micro_batches, calls: int64, one for each value.
        times: The wall clock of each value, datetime64[ns] in UTC.
        values: float64, bit for bit.
    """

    name: str
    rank: int
    iterations: NDArray[np.int64]
    micro_batches: NDArray[np.int64]
    calls: NDArray[np.int64]
    times: NDArray[np.datetime64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return self.values.size

    def __repr__(self) -> str:
        return f"<Scalar {self.name} of rank {self.rank} with {len(self)} values>"

    def pandas(self) -> Any:
        """Return a pandas.Series of the values, indexed by iteration and micro-batch.

        Raises:
            CapdError: The extra `table` is not installed.
        """
        pd = import_extra("pandas", "table")
        index = pd.MultiIndex.from_arrays(
            [self.iterations, self.micro_batches], names=["iteration", "micro_batch"]
        )
        return pd.Series(self.values, index=index, name=self.name)


def scalar_rows(nodes: Iterable[RunNode]) -> dict[tuple[str, int], ScalarRows]:
    """Return the series of each scalar by its name and rank, in this order."""
    found: dict[tuple[str, int], list[tuple[RunNode, SeriesRow]]] = defaultdict(list)
    for node in nodes:
        for row in node.series.values():
            if row.records and row.holds_scalars:
                found[row.header.key.tensor_name, row.header.key.rank].append((node, row))
    return {each: found[each] for each in sorted(found)}


def read_scalar(rows: ScalarRows, tools: ReadTools, attempt: int | str) -> Scalar:
    """Return one scalar of one rank.

    Raises:
        DamagedRecord: A value cannot be read exactly.
    """
    key = rows[0][1].header.key
    read = [each for node, row in rows for each in _values(Series(node, row, tools))]
    chosen = sorted(_of_attempt(read, attempt), key=lambda one: _place(one[0]))
    moments = [moment for moment, _ in chosen]

    def numbers(field: str) -> Any:
        return np.array([getattr(moment, field) for moment in moments], "int64")

    return Scalar(
        name=key.tensor_name,
        rank=key.rank,
        iterations=numbers("iteration"),
        micro_batches=numbers("micro_batch"),
        calls=numbers("call"),
        times=numbers("time_ns").view("datetime64[ns]"),
        values=np.array([value for _, value in chosen], "float64"),
    )


def _values(series: Series) -> Iterator[tuple[Moment, np.float64]]:
    return zip(series.moments, series.stack(), strict=True)


def _place(moment: Moment) -> tuple[int, ...]:
    return moment.iteration, moment.micro_batch, moment.call, moment.attempt, moment.time_ns


def _of_attempt(
    read: Sequence[tuple[Moment, np.float64]], attempt: int | str
) -> list[tuple[Moment, np.float64]]:
    """Return the values of one attempt, of all, or of the latest one at each place in the job."""
    if attempt == "all":
        return list(read)
    if attempt != "latest":
        return [one for one in read if one[0].attempt == attempt]
    newest: dict[tuple[int, ...], int] = {}
    for moment, _ in read:
        place = (moment.iteration, moment.micro_batch, moment.call)
        newest[place] = max(newest.get(place, 0), moment.attempt)
    return [one for one in read if newest[_place(one[0])[:3]] == one[0].attempt]
