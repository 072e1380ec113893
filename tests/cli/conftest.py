"""Real stores for the command line: written through the daemon's pipeline, read by `capd` as a user would."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capd.cli.app import main
from capd.server.pipeline.jobs import RecordJob
from capd.server.pipeline.pipeline import Pipeline
from capd.store.catalog.rows import SessionRow
from capd.store.run.options import StoreOptions
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Define, Descriptor
from tests.kit import forking

CLIENT = bytes(range(16))


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
    done = forking.run(
        [sys.executable, "-m", "capd", *map(str, args)],
        capture_output=True, text=True, timeout=60, cwd=cwd, env={**os.environ, **environ}, check=False,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def capd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`capd("ls", store)` runs the command line within this process: the same `main`, without the start-up."""

    def call(*args: str | Path, cwd: Path | None = None, **environ: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            if cwd is not None:
                patch.chdir(cwd)
            for name, value in environ.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main([*map(str, args)])
        return Result(int(end.value.code or 0), out.getvalue(), err.getvalue())

    return call


class _Unlimited:
    def refusal(self, nbytes: int, *, new_series: int = 0) -> str | None:
        return None


class _Collect:
    def __init__(self) -> None:
        self.refusals: list[str] = []

    def committed(self, sequences: Sequence[int]) -> None:
        pass

    def refused(self, sequence: int, reason: DropReason, message: str) -> None:
        self.refusals.append(f"{sequence}: {reason.value} {message}")


class StoreWriter:
    """Writes runs below `root` the way the daemon does, then closes them sealed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pipeline = Pipeline(
            root, "node0", StoreOptions(), threads=1, staging_nbytes=64 << 20, budget=_Unlimited()
        )
        self._sequence = 0
        self._sink = _Collect()
        self._lock = threading.Lock()

    def put(
        self, run_id: str, key: Key, array: np.ndarray[Any, Any], dtype: str, moment: Moment, **more: Any
    ) -> None:
        """Commit one record of stored bits."""
        self._pipeline.open_run(run_id)
        data = np.ascontiguousarray(array).tobytes()
        descriptor = Descriptor(self._sequence, 4096, len(data), 0, array.shape, moment, **more)
        define = Define(id=0, key=key, dtype=dtype)
        self._sequence += 1
        job = RecordJob(run_id, CLIENT, descriptor.sequence, define, descriptor, memoryview(data), self._sink)
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


@pytest.fixture(scope="module")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `first` (one record), then `second` (four series on two ranks, six records, a drop)."""
    root = tmp_path_factory.mktemp("captures")
    writer = StoreWriter(root)
    writer.put("first", linear_key(), bf16_bits(BF16_VALUES), "bfloat16", Moment(time_ns=1))
    writer.close()
    writer = StoreWriter(root)
    for micro_batch in (0, 1):
        moment = Moment(iteration=3, micro_batch=micro_batch, sample_idx=9, time_ns=1_700_000_000_000_000_000)
        more = {"requires_grad": True, "metadata": b'{"note": "hello"}'}
        writer.put(
            "second", linear_key(), bf16_bits(BF16_VALUES * (1 + micro_batch)), "bfloat16", moment, **more
        )
    for rank, layer in ((0, 2), (1, 0), (1, None)):
        module = "lm_head" if layer is None else f"blocks.{layer}.attn.q"
        key = linear_key(
            quant_type="fp32", rank=rank, layer=layer, module=module, tensor_name="output", phase="post"
        )
        writer.put(
            "second", key, np.arange(6, dtype=np.float32).reshape(2, 3), "float32", Moment(iteration=3)
        )
    backward = linear_key(operation="backward", tensor_name="grad_output")
    writer.put("second", backward, np.float64(2.5).reshape(()), "float64", Moment(iteration=3))
    writer.save_session("second", session_row())
    writer.close()
    return root


@pytest.fixture
def both_kinds(tmp_path: Path) -> Path:
    """A run with a tensor, and with the statistics alone of a tensor of the same key."""
    writer = StoreWriter(tmp_path)
    for payload in (True, False):
        bits = bf16_bits(BF16_VALUES)
        writer.put("both", linear_key(), bits, "bfloat16", Moment(iteration=3), payload=payload)
    return writer.close() / "both.zarr"


@pytest.fixture
def second(store_root: Path) -> Path:
    """The run directory of `second`."""
    return store_root / "second.zarr"
