"""Runs in object stores, as the upload puts them there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from capd.store.disk.layout import nodes_of
from capd.store.objects.address import Address, parse_address
from capd.store.upload.node_upload import NodeUpload
from capd.store.upload.sending.transfer import UploadTools
from tests.kit.objects.service import Bucket as TestBucket
from tests.kit.store.cli import session_row
from tests.kit.store.writing import Writer, key

__all__ = ["filled", "filled_in_rounds", "prefix", "publish"]


@pytest.fixture
def prefix(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Address:
    """A prefix in a bucket of the test's own. The environment leads there."""
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return parse_address(bucket.url("runs"))


def publish(run: Path, prefix: Address, *, nodes: Sequence[str] | None = None) -> Address:
    """Upload what is sealed of a run below a prefix, and return its address. nodes: all by default."""
    for node in nodes_of(run) if nodes is None else nodes:
        with NodeUpload(run, node, prefix, UploadTools.make()) as upload:
            while upload.round().more:
                pass
    return prefix / run.name


def filled(root: Path, *, run_id: str = "run", node: str = "n0", seed: int = 0, count: int = 9) -> Path:
    """A sealed run with large, small and empty records, statistics alone, and a second dtype."""
    writer = Writer(root, run_id=run_id, node=node)
    _fill(writer, seed, range(count))
    writer.close()
    return writer.run


def filled_in_rounds(root: Path, prefix: Address) -> Path:
    """A run as `filled`, which is uploaded while its session is live: in three segments of records."""
    for firsts in (range(16), range(16, 21), range(21, 23)):
        writer = Writer(root)
        writer.sequence = 6 * firsts.start
        _fill(writer, firsts.start, firsts)
        row = session_row(state="live", offered=6 * firsts.stop, committed=6 * firsts.stop, dropped={})
        writer.pipeline.save_session(writer.run_id, row)
        writer.close()
        publish(writer.run, prefix)
    return writer.run


def _fill(writer: Writer, seed: int, iterations: range) -> None:
    values = np.random.default_rng(seed)
    for iteration in iterations:
        for name, shape in (("large", (700, 900)), ("small", (3, 5)), ("none", (0, 4)), ("number", ())):
            bits = values.standard_normal(shape).astype("f4")
            writer.put(key(name, module=writer.node), "float32", bits, iteration=iteration)
        writer.put(
            key("bf", module=writer.node),
            "bfloat16",
            values.integers(0, 65536, (40, 30)).astype("u2"),
            iteration=iteration,
        )
        writer.put_statistics(
            key("stats", module=writer.node),
            "float32",
            values.standard_normal((8, 8)).astype("f4"),
            iteration=iteration,
        )
