"""The other engines of the store's benchmarks on one grid: zarr-python, its zarrs pipeline, and tensorstore.

All of them write the same as capd: the sharding codec, blosc-zstd with byte shuffle and 1 MiB blocks, crc32c.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.store.store_data import Bits
from capd.store.format.geometry import plan_geometry

__all__ = ["Array", "Grid", "create", "installed_engines", "open_array"]

ENGINES = ("zarr-python", "zarrs", "tensorstore")
LEVEL, BLOCK_NBYTES = 1, 1 << 20
ITEM_NBYTES = 2


@dataclass(frozen=True)
class Grid:
    """The extents of a sharded array [record, *shape] of uint16."""

    shape: tuple[int, ...]
    shards: tuple[int, ...]
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, records: int, shape: tuple[int, ...], shard_nbytes: int) -> Grid:
        """Return the grid that capd gives records of `shape`."""
        plan = plan_geometry(shape, ITEM_NBYTES, shard_nbytes)
        return cls((records, *shape), (plan.shard_records, *plan.extents), (plan.batch, *plan.chunk))


class Array(Protocol):
    """The operations of an engine on an array."""

    def write(self, first: int, block: Bits) -> None:
        """Write consecutive records in one call."""

    def write_shard(self, first: int, block: Bits) -> None:
        """Write the records of one whole shard in the engine's best way."""

    def read(self, record: int, rows: slice) -> Bits:
        """Return some rows of one record."""

    def read_all(self) -> Bits:
        """Return every record."""


class ZarrArray:
    """A zarr.Array, through the configured pipeline."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def write(self, first: int, block: Bits) -> None:
        self._array[first : first + len(block)] = block

    write_shard = write

    def read(self, record: int, rows: slice) -> Bits:
        return self._array[record, rows]

    def read_all(self) -> Bits:
        return self._array[...]


class TensorstoreArray:
    """A tensorstore array. A transaction holds a whole shard back until it is committed."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def write(self, first: int, block: Bits) -> None:
        self._array[first : first + len(block)] = block

    def write_shard(self, first: int, block: Bits) -> None:
        import tensorstore

        with tensorstore.Transaction() as transaction:
            view = self._array.with_transaction(transaction)
            for number, record in enumerate(block, first):
                view[number] = record

    def read(self, record: int, rows: slice) -> Bits:
        return self._array[record, rows].read().result()

    def read_all(self) -> Bits:
        return self._array.read().result()


def installed_engines() -> list[str]:
    """Return the engines that can be measured here. Prints which cannot."""
    if importlib.util.find_spec("zarrs") is not None:
        return list(ENGINES)
    print("zarrs is left out: it is not installed (pip install --no-deps zarrs)", file=sys.stderr)
    return [engine for engine in ENGINES if engine != "zarrs"]


def create(engine: str, path: Path, grid: Grid, threads: int) -> Array:
    """Make an empty array at `path`."""
    if engine == "tensorstore":
        return TensorstoreArray(_open_tensorstore(path, threads, _metadata(grid)))
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec

    _configure_zarr(engine, threads)
    blosc = BloscCodec(
        typesize=ITEM_NBYTES, cname="zstd", clevel=LEVEL, shuffle="shuffle", blocksize=BLOCK_NBYTES
    )
    array = zarr.create_array(
        path,
        shape=grid.shape,
        shards=grid.shards,
        chunks=grid.chunks,
        dtype="uint16",
        fill_value=0,
        compressors=[blosc, Crc32cCodec()],
    )
    return ZarrArray(array)


def open_array(engine: str, path: Path, threads: int) -> Array:
    """Open the array at `path` for reading."""
    if engine == "tensorstore":
        return TensorstoreArray(_open_tensorstore(path, threads, None))
    import zarr

    _configure_zarr(engine, threads)
    return ZarrArray(zarr.open_array(path, mode="r"))


def _configure_zarr(engine: str, threads: int) -> None:
    import numcodecs.blosc
    import zarr

    # blosc's own threads would only contend with zarr's. capd does the same.
    numcodecs.blosc.use_threads = False
    settings: dict[str, Any] = {"threading.max_workers": threads, "async.concurrency": max(2, threads)}
    if engine == "zarrs":
        import zarrs  # noqa: F401 - registers its pipeline

        settings["codec_pipeline.path"] = "zarrs.ZarrsCodecPipeline"
    zarr.config.set(settings)


def _open_tensorstore(path: Path, threads: int, metadata: dict[str, Any] | None) -> Any:
    import tensorstore

    limit = {"limit": threads}
    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "context": {"data_copy_concurrency": limit, "file_io_concurrency": limit},
    }
    if metadata is not None:
        spec |= {"metadata": metadata, "create": True}
    return tensorstore.open(spec).result()


def _metadata(grid: Grid) -> dict[str, Any]:
    little, crc = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
    blosc = {
        "name": "blosc",
        "configuration": {
            "cname": "zstd", "clevel": LEVEL, "shuffle": "shuffle", "typesize": ITEM_NBYTES, "blocksize": BLOCK_NBYTES,
        },
    }  # fmt: skip
    sharding = {"chunk_shape": grid.chunks, "codecs": [little, blosc, crc], "index_codecs": [little, crc]}
    return {
        "shape": grid.shape,
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid.shards}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
