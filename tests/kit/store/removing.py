"""Small runs to remove, and their age."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from capd_client.protocol.key import Moment
from tests.kit.store.cli import StoreWriter, linear_key, session_row

__all__ = ["age", "files_below", "small_run"]


def small_run(root: Path, name: str, *, command: str = "", layers: int = 2, steps: int = 3) -> Path:
    """Write a sealed run of float32 records: one series for each layer. Without steps it has no records."""
    writer = StoreWriter(root)
    writer.open(name)
    for step in range(steps):
        for layer in range(layers):
            key = linear_key(layer=layer, module=f"blocks.{layer}.fc", quant_type="mxfp8")
            writer.put(
                name, key, np.full((16, 16), 100 * layer + step, "f4"), "float32", Moment(iteration=step)
            )
    records = layers * steps
    writer.save_session(
        name, session_row(offered=records, committed=records, dropped={}, command=command, started_ns=10**18)
    )
    writer.close()
    return root / f"{name}.zarr"


def age(run: Path, days: float) -> None:
    """Let a run have changed so many days ago."""
    then = time.time() - days * 86_400
    for path in (run / "zarr.json", *run.glob(".capd/node=*/catalog.sqlite")):
        os.utime(path, (then, then))


def files_below(place: Path) -> dict[str, bytes]:
    """The files below a directory, but for the locks."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.name.endswith("lock")
    }
