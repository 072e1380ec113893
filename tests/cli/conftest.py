"""Real stores for the command line: written through the daemon's pipeline, read by `capd` as a user would."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from capd.cli.app import main
from capd_client.protocol.key import Moment
from tests.kit.store.cli import BF16_VALUES, Result, StoreWriter, bf16_bits, linear_key, session_row


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


@pytest.fixture(params=[0o022, pytest.param(0o077, marks=pytest.mark.slow)], ids=["umask 022", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The umask of the test: one that lets others read, and one that does not."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


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
