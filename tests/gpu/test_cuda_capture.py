"""CUDA tensors through the real device path: exact, without a host synchronisation, with flat device memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capd
from tests.integration.processes import Daemon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

JOB = """
import torch, capd_client

generator = torch.Generator("cuda").manual_seed(1)
sizes = [(3,), (64, 64), (512, 1024), (1025, 1023), ()]
first = torch.zeros(8, device="cuda")
capd_client.capture(first, tensor_name="warm-up")
capd_client.flush()
held = []
torch.cuda.set_sync_debug_mode("error")
before = torch.cuda.memory_allocated()
for n in range(100):
    for shape in sizes:
        tensor = torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(torch.bfloat16)
        kept = tensor.clone()
        capd_client.capture(tensor, tensor_name=f"t{len(shape)}", iteration=n)
        tensor.zero_()  # an in-place write right behind the capture
        tensor.untyped_storage().resize_(0)  # and its memory is gone
        if n % 20 == 0:
            held.append((n, len(shape), kept))
torch.cuda.set_sync_debug_mode("default")
del tensor, kept
assert capd_client.flush(60), capd_client.counters()
assert not capd_client.counters()["dropped"], capd_client.counters()
torch.save([(n, d, t.cpu()) for n, d, t in held], "held.pt")
"""


def test_cuda_tensors_arrive_as_they_were_at_capture(tmp_path: Path, runtime_dir: Path) -> None:
    daemon = Daemon(tmp_path / "store", runtime_dir).start()
    try:
        environment = {
            **os.environ,
            "CAPD_ENDPOINT": daemon.endpoint,
            "CAPD_RUN_ID": "run",
            "CAPD_POLICY": "block",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        subprocess.run([sys.executable, "-c", JOB], env=environment, cwd=tmp_path, check=True, timeout=110)
        daemon.stop()
    finally:
        daemon.discard()

    found = {
        (record.iteration, len(record.shape), tuple(record.shape)): series.torch(i)
        for series in capd.open(tmp_path / "store" / "run.zarr").series
        for i, record in enumerate(series.records)
        if record.device.startswith("cuda") and series.key.tensor_name != "warm-up"
    }
    assert len(found) == 500
    for n, ndim, held in torch.load(tmp_path / "held.pt", weights_only=True):
        assert torch.equal(found[n, ndim, tuple(held.shape)].view(torch.int16), held.view(torch.int16))
