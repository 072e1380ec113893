"""The check of the array that plain Zarr readers see. It runs before a library uses the numbers in its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capd.errors import DamagedRecord, StoreError
from capd.store.format.frames import SeriesHeader
from capd.store.scan.described import array_problems
from capd.store.scan.published import array_in, read_array
from capd.store.scan.survey import moved_shards, shard_files

__all__ = ["check_array", "check_document"]


def check_array(run: Path, header: SeriesHeader) -> None:
    """Check that the metadata of a series' array matches its header and shards.

    Raises:
        DamagedRecord: The metadata does not match, or cannot be read.
        StoreError: Shards were moved to an object store. The message says where.
    """
    if moved := moved_shards(run, header.path):
        to = next(iter(moved.values())).to
        raise StoreError(
            f"{header.path}: {len(moved)} shards were moved to {to}, where plain Zarr readers find them; "
            f"`capd.open('{to}')` has the array, and `numpy` reads single records from here"
        )
    held = header.geometry.shard_records * len(shard_files(run / header.path))
    _check(read_array(run / header.path), header, held)


def check_document(payload: bytes, header: SeriesHeader, held: int, place: object) -> None:
    """Check the same of a document in memory.

    Args:
        payload: The document.
        header: The header of the series.
        held: The most records that the shards hold.
        place: Where it is, for the message.

    Raises:
        DamagedRecord: The metadata does not match, or cannot be read.
    """
    _check(array_in(payload, place), header, held)


def _check(document: dict[str, Any], header: SeriesHeader, held: int) -> None:
    problem = next(array_problems(document, header), None)
    if problem is None and document["shape"][0] > held:
        problem = f"it claims {document['shape'][0]} records, but the shards hold at most {held}"
    if problem is not None:
        raise DamagedRecord(f"{header.path}: data/zarr.json: {problem}; `capd verify` lists all damage")
