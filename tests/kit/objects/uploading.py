"""Daemons that upload, with the environment of a bucket, and what their tests ask them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.daemon import DaemonProcess, wait_for
from tests.kit.objects.service import Bucket
from tests.kit.store.writing import Writer, key

__all__ = ["PREFIX", "filled_run", "serve", "upload_of", "uploaded_all"]

PREFIX = "captures"


def filled_run(
    root: Path, *, run_id: str = "run", records: int = 4, series: int = 3, is_sealed: bool = True
) -> Writer:
    """A run with small and large series, whose shards are small files."""
    writer = Writer(root, run_id=run_id, node="n")
    for step in range(records):
        for number in range(series):
            values = np.random.default_rng(1000 * step + number).standard_normal((300, 300)).astype("<f4")
            writer.put(key("input", layer=number), "float32", values, iteration=step)
        writer.put(key("bias"), "float32", np.full((8,), step, "<f4"), iteration=step)
    if is_sealed:
        writer.close()
    return writer


def serve(
    root: Path,
    socket: Path,
    bucket: Bucket,
    *options: str,
    environ: Mapping[str, str] | None = None,
    **more: Any,
) -> DaemonProcess:
    """A daemon of node n that uploads to the bucket."""
    environment = {**os.environ, **bucket.environment(), **(environ or {})}
    where = ("--upload-to", bucket.url(PREFIX))
    return DaemonProcess(root, socket, *where, *options, env=environment, **more)


def upload_of(daemon: DaemonProcess) -> dict[str, Any]:
    """The figures of a daemon's uploads."""
    found: dict[str, Any] = daemon.stats()["upload"]
    return found


def uploaded_all(bucket: Bucket, run: str = "run", node: str = "n", timeout_s: float = 60.0) -> None:
    """Wait until a run is complete in the bucket."""
    from tests.kit.objects.published import manifest_of

    def is_there() -> bool:
        found = manifest_of(bucket, f"{PREFIX}/{run}.zarr", node)
        return found is not None and found.is_complete

    wait_for(is_there, f"{run} is uploaded", timeout_s)
