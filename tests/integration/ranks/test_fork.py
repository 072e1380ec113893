"""A forked DataLoader worker neither captures nor keeps the rank's arena or socket alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kit import forking
from tests.kit.checking import captured_numbers
from tests.kit.processes import Daemon, at_rest, live_stats, until

JOB = """
import os, sys
import torch
import capd_client
from tests.kit import content

def links():
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # closed meanwhile, as the listing's own
            pass
    return found

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        capd_client.capture(torch.ones(3), tensor_name="from_worker")
        capd_client.flush(timeout_s=1)
        maps = sum("memfd:capd" in line for line in open("/proc/self/maps"))
        held = sum("memfd:capd" in link for link in links())
        return torch.tensor([maps, held, capd_client.counters()["offered"]])

capd_client.capture(content.tensor(0, 0), tensor_name=content.name(0), iteration=0)
assert capd_client.flush()
loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork", persistent_workers=True)
print([row.tolist() for row in loader], flush=True)
capd_client.capture(content.tensor(0, 1), tensor_name=content.name(1), iteration=1)
assert capd_client.flush()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_forked_worker_is_inert_and_holds_nothing(tmp_path: Path, daemon: Daemon) -> None:
    environment = {
        **os.environ,
        "CAPD_ENDPOINT": daemon.endpoint,
        "CAPD_RUN_ID": "run",
        "CAPD_ARENA_BYTES": str(16 << 20),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    job = forking.popen(
        [sys.executable, "-c", JOB], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert job.stdout is not None
        rows = eval(job.stdout.readline())  # noqa: S307 - our own process
        assert job.stdout.readline() == "ready\n"
        assert all(maps == 0 and links == 0 for [[maps, links, _]] in rows)

        workers = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        assert len(workers) == 2
        job.kill()  # the workers live on for a moment; the daemon must not wait for them
        until(lambda: all(map(at_rest, live_stats(daemon.endpoint)["sessions"])))
    finally:
        job.kill()
        job.communicate()
    stats = live_stats(daemon.endpoint)
    assert {session["state"] for session in stats["sessions"]} == {"died"}
    assert (stats["offered"], stats["committed"], stats["dropped"]) == (2, 2, {})
    assert daemon.process is not None
    maps = Path(f"/proc/{daemon.process.pid}/maps")
    until(lambda: "memfd:capd" not in maps.read_text())
    daemon.stop()
    assert captured_numbers(tmp_path / "store" / "run.zarr", 0) == [0, 1]
