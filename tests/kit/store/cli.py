"""Stores for the command line to read, and what a run of `capd` prints."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.server.pipeline.jobs import RecordJob
from capd.server.pipeline.pipeline import Pipeline
from capd.store.catalog.rows import SessionRow
from capd.store.run.options import StoreOptions
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor
from tests.kit import forking
from tests.kit.store.writing import NoLimit, Outcomes

CLIENT = bytes(range(16))
# Runs the command line where matplotlib cannot be imported.
WITHOUT_MATPLOTLIB = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
sys.meta_path.insert(0, Blocker())
from capd.cli.app import main
main(sys.argv[1:])
"""


@dataclass(frozen=True)
class Result:
    """How a `capd` process ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_capd(*args: str | Path, cwd: Path | None = None, **environ: str) -> Result:
    """Run `capd ARGS` in a process of its own."""
    # The tests of the store alone run where it is not installed.
    pytest.importorskip("typer", reason="the command line needs typer")
    done = forking.run(
        [sys.executable, "-m", "capd", *map(str, args)],
        capture_output=True, text=True, timeout=100, cwd=cwd, env={**os.environ, **environ}, check=False,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


class StoreWriter:
    """Writes runs below `root` the way the daemon does, then closes them sealed."""

    def __init__(self, root: Path, node: str = "node0") -> None:
        self.root = root
        self._pipeline = Pipeline(
            root, node, StoreOptions(), threads=1, staging_nbytes=64 << 20, budget=NoLimit()
        )
        self._sequence = 0
        self.client = CLIENT
        self._sink = Outcomes()
        self._lock = threading.Lock()

    def put(
        self, run_id: str, key: Key, array: np.ndarray[Any, Any], dtype: str, moment: Moment, **more: Any
    ) -> None:
        """Commit one record of stored bits. `more`: the key's `attributes`, and further fields of the descriptor."""
        attributes = more.pop("attributes", {})
        self._pipeline.open_run(run_id)
        data = np.ascontiguousarray(array).tobytes()
        descriptor = Descriptor(self._sequence, 4096, len(data), 0, array.shape, moment, **more)
        define = Define(id=0, key=key, dtype=dtype, attributes=attributes)
        self._sequence += 1
        job = RecordJob(
            run_id, self.client, descriptor.sequence, define, descriptor, memoryview(data), self._sink
        )
        self._pipeline.submit(job)

    def open(self, run_id: str) -> None:
        """Create the run without a record."""
        self._pipeline.open_run(run_id)

    def save_session(self, run_id: str, row: SessionRow) -> None:
        """Persist a rank's counters."""
        self._pipeline.save_session(run_id, row).result(timeout=10)

    def close(self) -> Path:
        """Drain and seal; nothing may have been refused."""
        assert self._pipeline.close(20)
        assert not self._sink.refusals
        return self.root


def session_row(**changes: Any) -> SessionRow:
    values: dict[str, Any] = {
        "client": CLIENT, "rank": 0, "attempt": 0, "host": "node0", "pid": 4242, "started_ns": 1, "ended_ns": 2,
        "state": "ended", "offered": 7, "committed": 6, "in_flight": 0, "dropped": {"arena_full": 1},
    }  # fmt: skip
    return SessionRow(**{**values, **changes})


def linear_key(**changes: Any) -> Key:
    values: dict[str, Any] = {
        "quant_type": "bf16", "rank": 0, "tensor_name": "input", "layer": 0, "phase": "pre", "layer_type": "linear",
        "operation": "forward", "component": "linear", "module": "blocks.0.mlp.fc1", "stack": "blocks",
    }  # fmt: skip
    return Key(**{**values, **changes})


BF16_VALUES = np.array([[1.0, -2.0, 0.0, 0.5], [np.inf, 4.0, -0.0, np.nan]], dtype=np.float32)


def bf16_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def damaged(root: Path) -> Path:
    """A run of four records of which the second one's elements are not what was captured."""
    writer = StoreWriter(root)
    rng = np.random.default_rng(0)
    for number in range(4):
        bits = bf16_bits(rng.normal(size=(512, 512)))
        writer.put("run", linear_key(), bits, "bfloat16", Moment(iteration=number))
    run = writer.close() / "run.zarr"
    shard = shard_of(run)
    place = shard.stat().st_size * 3 // 8  # the middle of the second quarter
    with shard.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x55]))
    return run


def shard_of(run: Path) -> Path:
    [shard] = [path for path in run.glob("*/*/*/*/*input/data/c/**/*") if path.is_file()]
    return shard
