"""A plan of a job on a GPU: its own speed of the link, the ring it would get, and the records that then come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import capd
from tests.kit.gpu.job import python_path

JOB = """
import torch, capd_client
model = torch.nn.Linear(256, 128, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
capd_client.watch(model)
for _ in range(3):
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_plan_of_a_gpu_job_is_what_is_then_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    command = [sys.executable, "-m", "capd"]
    job = ["--", sys.executable, "-c", JOB]

    planned = subprocess.run(
        [*command, "plan", "--json", *job],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=110,
        check=True,
    )
    subprocess.run([*command, "run", "--run-id", "r", *job], cwd=tmp_path, timeout=110, check=True)

    [rank] = json.loads(planned.stdout)["ranks"]
    store = capd.open(tmp_path / "captures" / "r.zarr")
    assert {(one["tensor_name"], *one["shapes"][0]): one["records"] for one in rank["series"]} == {
        (series.key.tensor_name, *series.records[0].shape): len(series.records) for series in store.series
    }
    assert rank["link"] == "device to pinned memory, measured"
    assert rank["link_bytes_per_s"] > 1e8
    assert 0 < rank["ring_bytes"] <= 256 << 20
