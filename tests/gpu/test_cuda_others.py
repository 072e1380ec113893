"""Others' copies beside captures: uploads and collectives keep most of their rate, and every capture arrives."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.kit.gpu.job import Job

# Of the rate without captures. Uploads go the other way on the link, and collectives another way altogether.
MUST_REMAIN = 0.85

RATES = """
import json, os, statistics
def rates(work, nbytes, kinds=("nothing", "captures")):
    # in turns, so that a clock that slows down slows both
    found = {kind: [] for kind in kinds}
    for n in range(25):
        for kind in kinds:
            if kind == "captures":
                capture(tensor, f"beside-{rank}", n)
            torch.cuda.synchronize() if kind == "nothing" else torch.cuda.current_stream().synchronize()
            started = time.perf_counter()
            work()
            torch.cuda.current_stream().synchronize()
            found[kind].append(nbytes / (time.perf_counter() - started) / 1e9)
            drained()
    return {kind: statistics.median(each[5:]) for kind, each in found.items()}
"""

UPLOADS = (
    RATES
    + """
ready()
rank = 0
tensor = torch.zeros(16 << 20, device="cuda")
host = torch.zeros(64 << 20, dtype=torch.uint8, pin_memory=True)
target = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
found = rates(lambda: target.copy_(host, non_blocking=True), host.nbytes)
assert not drained()["dropped"]
print(json.dumps(found))
"""
)

COLLECTIVES = (
    RATES
    + """
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2, init_method="file://" + os.path.abspath("rendezvous"))
session().prepare([torch.device("cuda", rank)])
tensor = torch.zeros(16 << 20, device="cuda")
whole = torch.empty(32 << 20, device="cuda")
found = rates(lambda: dist.all_gather_into_tensor(whole, tensor), tensor.nbytes)
assert not drained()["dropped"]
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(found))
"""
)


def judge(what: str, output: str, record_property: Callable[[str, object], None]) -> None:
    found = json.loads(output.splitlines()[-1])
    record_property(what, found)
    print(what, found)
    assert found["captures"] >= MUST_REMAIN * found["nothing"], found


def test_uploads_keep_their_rate_beside_captures(
    job: Job, record_property: Callable[[str, object], None]
) -> None:
    captured = job.run(UPLOADS, arena_bytes=str(4 << 30))
    assert len(captured.tensors) == 25
    judge("host to device, GB/s", captured.output, record_property)


@pytest.mark.usefixtures("two_gpus")
def test_collectives_keep_their_rate_beside_captures(
    job: Job, record_property: Callable[[str, object], None]
) -> None:
    settings = {"arena_bytes": str(2 << 30)}
    job.environment["RANK"] = "1"
    other = job.start(COLLECTIVES, **settings)
    try:
        job.environment["RANK"] = "0"
        captured = job.run(COLLECTIVES, **settings)
        job.end(other)
    finally:
        other.kill()
        other.wait()
    assert len(captured.tensors) == 50
    judge("all-gather, GB/s", captured.output, record_property)
