"""What readers find in a store: through capd, and as plain Zarr. Each record names itself by its iteration."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray

import capd
from capd.errors import CapdError, DamagedRecord
from capd_client.protocol.key import Key
from tests.kit.store.reading import published_rows

__all__ = ["Found", "Seen", "read_with_capd", "read_with_zarr"]


@dataclass(frozen=True)
class Found:
    """A record as a reader found it. bits: its elements, or its statistics row where only that is kept; None where
    reading it raised DamagedRecord."""

    identity: int
    key: Key
    dtype: str
    bits: NDArray[np.generic] | None


@dataclass
class Seen:
    """Records by series path, in the order of their numbers. errors: what else reading raised, each a CapdError."""

    series: dict[str, list[Found]] = field(default_factory=dict)
    errors: list[CapdError] = field(default_factory=list)

    def all(self) -> list[Found]:
        """The records of all series."""
        return [found for records in self.series.values() for found in records]

    def identities(self) -> list[int]:
        """The identities of all records."""
        return [found.identity for found in self.all()]

    def damaged(self) -> set[int]:
        """The identities of the records that are there and cannot be read."""
        return {found.identity for found in self.all() if found.bits is None}


def read_with_capd(run: Path) -> Seen:
    """Every record, whatever state the store is in. An error that is no CapdError is raised."""
    seen = Seen()
    try:
        store = capd.open(run)
    except CapdError as error:
        seen.errors.append(error)
        return seen
    for series in store.series:
        for number in range(len(series)):
            try:
                identity = series.records[number].iteration
            except CapdError as error:
                seen.errors.append(error)
                continue
            bits: NDArray[np.generic] | None = None
            try:
                bits = series.read(series.numbers[number])
            except DamagedRecord as error:
                seen.errors.append(error)
            found = Found(identity, series.key, series.dtype, bits)
            seen.series.setdefault(series.path, []).append(found)
    return seen


def read_with_zarr(run: Path) -> Seen:
    """Every published record, by the metadata alone. What zarr-python raises is raised, but for checksums.

    errors: documents that are no JSON, as a power loss leaves them of a series that was never sealed.
    """
    seen = Seen()
    for group in sorted(run.glob("*/rank*/layer*/*/*")):
        if not (group / "data" / "zarr.json").exists():
            continue
        try:
            for document in (group / "zarr.json", group / "data" / "zarr.json"):
                json.loads(document.read_bytes())
        except (ValueError, FileNotFoundError) as error:
            seen.errors.append(CapdError(f"{document}: {error}"))
            continue
        rows = published_rows(group)
        if not rows:
            continue
        attributes = json.loads((group / "zarr.json").read_bytes())["attributes"]["capd"]
        array = zarr.open_array(group / "data", mode="r")
        key, dtype = Key(**attributes["key"]), attributes["dtype"]
        found = seen.series[str(group.relative_to(run))] = []
        for number, (moment, shape) in enumerate(rows):
            try:
                crop = () if attributes["encoding"] == "statistics" else tuple(slice(0, n) for n in shape)
                bits = np.asarray(array[(number, *crop)])
            except (ValueError, RuntimeError):  # a chunk's checksum
                bits = None
            found.append(Found(moment.iteration, key, dtype, bits))
    return seen
