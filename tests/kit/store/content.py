"""What a run holds, as values that two runs can be compared by."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from capd.store.catalog.opening import connect_read_only
from capd.store.catalog.rows import CATALOG_NAME
from capd.store.objects.address import RunPlace
from capd.store.read.store import open_store
from capd_client.protocol.key import Moment


def content_of(run: RunPlace) -> dict[str, list[dict[str, Any]]]:
    """Every record of every series of tensors, by the series' path, bit for bit."""
    found = {}
    for series in open_store(run).series:
        if series.kept != "tensor":
            continue
        found[series.path] = [
            {
                "key": series.key,
                "dtype": series.dtype,
                "moment": tuple(getattr(record, name) for name in Moment.__struct_fields__),
                "shape": record.shape,
                "device": record.device,
                "flags": (record.requires_grad, record.is_leaf),
                "metadata": record.metadata,
                "attributes": record.attributes,
                "stats": repr(asdict(record.stats)),  # NaN equals itself there
                "bits": series.numpy(position).tobytes(),
            }
            for position, record in enumerate(series.records)
        ]
    return found


def tables(run: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every table of the catalog, with paths for series ids."""
    database = connect_read_only(run / ".capd" / "node=n0" / CATALOG_NAME)
    try:
        paths = dict(database.execute("SELECT id, path FROM series"))
        found: dict[str, list[tuple[object, ...]]] = {}
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
            rows = database.execute(f"SELECT * FROM {name}").fetchall()  # noqa: S608 - a table of ours
            if name in ("series", "records"):
                rows = [(paths[row[0]], *row[1:]) for row in rows]
            found[name] = sorted(rows, key=repr)
        return found
    finally:
        database.close()
