"""Compares a store with what was put into it, through capd and through readers that know nothing of capd."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import zarr
from numpy.typing import NDArray

import capd
from capd_client.protocol.key import Key, Moment

ZARRS: dict[str, str] = {}
with contextlib.suppress(ImportError):  # `make test-store` has none
    import zarrs  # noqa: F401  # registers its pipeline

    ZARRS["codec_pipeline.path"] = "zarrs.ZarrsCodecPipeline"

Held = dict[tuple[Key, str], list[tuple[Moment, NDArray[np.generic]]]]


def _sorted(records: list[tuple[Moment, NDArray[np.generic]]]) -> list[tuple[Any, ...]]:
    plain = [
        (m.iteration, m.micro_batch, m.call, bits.shape, bits.dtype.str, bits.tobytes())
        for m, bits in records
    ]
    return sorted(plain)


def assert_capd_reads(run: Path, held: Held) -> None:
    """capd.open returns exactly the held records, bit for bit."""
    found: Held = {}
    for series in capd.open(run).series:
        for i, record in enumerate(series.records):
            moment = Moment(record.iteration, record.micro_batch, record.call)
            bits = series.numpy(i)
            assert bits.shape == record.shape
            assert record.stats.count == bits.size * (2 if series.dtype == "float4_e2m1fn_x2" else 1)
            found.setdefault((series.key, series.dtype), []).append((moment, bits))
    assert found.keys() == held.keys()
    for identity, records in held.items():
        assert _sorted(found[identity]) == _sorted(records), identity


def assert_zarr_readers_read(run: Path, held: Held) -> None:
    """zarr-python, tensorstore and zarrs (if installed) see exactly the held records, by the published columns."""
    found: Held = {}
    for group in sorted(run.glob("*/rank*/layer*/*/*")):
        if not (group / "data" / "zarr.json").exists():
            continue
        attributes = json.loads((group / "zarr.json").read_text())["attributes"]["capd"]
        identity = (Key(**attributes["key"]), attributes["dtype"])
        array = zarr.open_array(group / "data", mode="r")[...]
        with zarr.config.set(ZARRS):
            assert zarr.open_array(group / "data", mode="r")[...].tobytes() == array.tobytes()
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(group / "data")}}
        assert tensorstore.open(spec).result().read().result().tobytes() == array.tobytes()
        for number, (moment, shape) in enumerate(published_rows(group)):
            bits = array[(number, *(slice(0, n) for n in shape))]
            found.setdefault(identity, []).append((moment, np.asarray(bits)))
    assert {k: _sorted(v) for k, v in found.items()} == {k: _sorted(v) for k, v in held.items()}


def published_rows(group: Path) -> list[tuple[Moment, tuple[int, ...]]]:
    """Moments and shapes as a plain Zarr reader finds them (docs/format.md)."""
    columns = json.loads((group / "zarr.json").read_text())["attributes"]["capd"]["records"]
    count = min(columns["count"], zarr.open_array(group / "data", mode="r").shape[0])
    if "array" in columns:
        table = zarr.open_array(group / columns["array"], mode="r")
        names = table.attrs["columns"]
        axes = [names.index(name) for name in names if name.startswith("shape_")]
        rows = table[:count]
        at = {name: names.index(name) for name in names}
        return [
            (
                Moment(*(int(row[at[name]]) for name in ("iteration", "micro_batch", "call"))),
                tuple(map(int, row[axes])),
            )
            for row in rows
        ]

    def column(name: str, n: int) -> Any:
        values = columns[name]
        varies = isinstance(values, list) and (
            name != "shape" or (bool(values) and isinstance(values[0], list))
        )
        return values[n] if varies else values

    return [
        (
            Moment(*(column(name, n) for name in ("iteration", "micro_batch", "call"))),
            tuple(column("shape", n)),
        )
        for n in range(count)
    ]
