"""One run written by several nodes: a Store shows it as one, and each node's part stands for itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import capd
from capd_client.protocol.key import Moment
from tests.kit.store.reading import assert_zarr_readers_read
from tests.kit.store.writing import Writer, key

KEYS = [key("input"), key("weight", module="m"), key("input", rank=1)]


def filled(root: Path, node: str, seed: int) -> Writer:
    """A writer of `node` that put records of the same keys as every other node."""
    writer = Writer(root, node=node)
    values = np.random.default_rng(seed)
    for iteration in range(6):
        for identity in KEYS:
            for name, shape in (("large", (300, 400)), ("small", (3, 5))):
                bits = values.standard_normal(shape).astype("f4")
                writer.put(
                    key(f"{identity.tensor_name}.{name}", rank=identity.rank, module=identity.module),
                    "float32",
                    bits,
                    iteration=iteration,
                )
    writer.flush()
    return writer


def content(run: Path) -> list[tuple[object, ...]]:
    """All records of a run, whoever wrote them."""
    return sorted(
        (series.key.rank, series.key.tensor_name, record.iteration, series.numpy(i).tobytes())
        for series in capd.open(run).series
        for i, record in enumerate(series.records)
    )


def held(*writers: Writer) -> list[tuple[object, ...]]:
    """What was put into the writers."""
    return sorted(
        (identity.rank, identity.tensor_name, moment.iteration, bits.tobytes())
        for writer in writers
        for (identity, _), records in writer.held.items()
        for moment, bits in records
    )


def test_two_nodes_are_one_store(tmp_path: Path) -> None:
    first, second = filled(tmp_path, "n0", 1), filled(tmp_path, "n1", 2)
    assert content(first.run) == held(first, second)  # both live, nothing sealed
    first.close()
    assert content(first.run) == held(first, second)  # one sealed, the other live
    second.close()

    assert content(first.run) == held(first, second)
    store = capd.open(first.run)
    found = store.find(rank=1, tensor_name="input.large")
    assert [series.path.partition("~")[2] for series in found] == ["", "v1"]  # the second node's is a variant
    assert [len(series) for series in found] == [6, 6]
    assert store.totals().records == 72
    assert [series.path for series in store.series] == sorted(series.path for series in store.series)
    both: dict[object, list[tuple[Moment, np.ndarray]]] = {}
    for writer in (first, second):
        for identity, records in writer.held.items():
            both.setdefault(identity, []).extend(records)
    assert_zarr_readers_read(first.run, both)


def test_what_one_node_lost_the_others_keep(tmp_path: Path) -> None:
    first, second = filled(tmp_path, "n0", 1), filled(tmp_path, "n1", 2)
    first.close()
    second.close()
    (first.run / ".capd" / "node=n1" / "catalog.sqlite").unlink()
    assert content(first.run) == held(
        first, second
    )  # the journals stand in for n1's catalog, and for no other

    shutil.rmtree(first.run / ".capd")
    assert content(first.run) == held(first, second)  # a copy of the Zarr hierarchy alone
