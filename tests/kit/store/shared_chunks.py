"""Records that share a chunk, and what damages them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from capd.store.catalog.rows import CATALOG_NAME
from capd.store.run.run_store import RunStore
from tests.kit.store.writing import Writer, key

RNG = np.random.default_rng(5)


# Ten of these share a chunk, which is written anew with every COMMIT.
SHARED = key("shared")


def put_shared(writer: Writer, *iterations: int) -> None:
    """Put records and move them to their shard with one COMMIT; beside them one that waits, so that the log stays."""
    for iteration in iterations:
        bits = RNG.standard_normal((200, 128)).astype("f4")
        writer.put(SHARED, "float32", bits, iteration=iteration)
    writer.put(key(f"waiting-{iterations[0]}"), "float32", np.ones(3, "f4"))
    writer.flush()
    writer.pipeline.post("run", _settle).result(timeout=30)


def _settle(store: RunStore) -> None:
    [series] = [series for series in store._series.values() if series.header.key == SHARED]
    store._settle(series)
    store._log.rotate()
    store.flush_catalog()


def lose_catalog(run: Path) -> None:
    for path in (run / ".capd" / "node=n0").glob(f"{CATALOG_NAME}*"):
        path.unlink()


def lose_what_names_records(run: Path) -> None:
    """The catalog, and the published columns of the series."""
    lose_catalog(run)
    [document] = run.glob("*/rank0/layer0/pre/tensor.forward.shared/zarr.json")
    document.write_bytes(b"")


def sealed_shard(run: Path) -> Path:
    [path] = run.glob("*/rank0/layer0/pre/tensor.forward.shared/data/c/0/0/0")
    return path
