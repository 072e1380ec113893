"""Real process groups: sharded and pending tensors, and ranks that capture unevenly."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.kit import forking
from tests.kit.client.peer import Peer

pytestmark = pytest.mark.timeout(300)  # every process imports most of torch.distributed

OPENING = """
    import json, os, sys
    import torch
    from torch import distributed as dist
    import capd_client

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
"""
CLOSING = """
    dist.barrier()
    model = optimizer = loss = None  # a DDP model that outlives its group may wait for gloo for ever
    dist.destroy_process_group()
"""


def run_group(script: str, env: dict[str, str], directory: Path, name: str = "job") -> list[str]:
    """Run `script` on two ranks that form a gloo group; what each printed."""
    path, meeting = directory / f"{name}.py", directory / f"{name}.group"
    path.write_text(textwrap.dedent(OPENING) + textwrap.dedent(script) + textwrap.dedent(CLOSING))
    ranks = [
        forking.popen(
            [sys.executable, str(path), str(meeting)],
            env=env
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            imports=forking.TRAINING,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=140) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors
    return [out for out, _ in said]


def floats(*values: float) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def test_shards_and_pending_collectives_are_captured_with_the_values_that_their_next_user_gets(
    peer: Peer, job_env: dict[str, str], tmp_path: Path
) -> None:
    run_group(
        """
        from torch.distributed import _functional_collectives as functional
        from torch.distributed.tensor import Partial, Replicate, Shard, DTensor, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
        capd_client.capture(sharded, tensor_name="sharded")

        pending = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)
        assert type(pending).__name__ == "AsyncCollectiveTensor"
        capd_client.capture(pending, tensor_name="pending")
        capd_client.capture(pending.view(3, 1)[1:], tensor_name="view of pending")
        assert (pending + 0).tolist() == [3.0] * 3, "the job's own use comes after ours"

        partial = DTensor.from_local(torch.full((2,), rank + 1.0), mesh, [Partial()])
        reduced = partial.redistribute(mesh, [Replicate()], async_op=True)
        with torch.no_grad():
            capd_client.capture(reduced, tensor_name="pending shard")

        gathered = functional.all_gather_tensor(torch.full((1,), float(rank)), 0, dist.group.WORLD)
        del gathered  # given up by the job while it is under way
        assert capd_client.flush(30)
        counters = capd_client.counters()
        assert counters["committed"] == 4, counters
        """,
        job_env,
        tmp_path,
    )
    found = {(r.key.rank, r.key.tensor_name): (tuple(r.descriptor.shape), r.data) for r in peer.records}
    for rank in range(2):
        first = 4.0 * rank
        assert found[rank, "sharded"] == ((2, 2), floats(first, first + 1, first + 2, first + 3))
        assert found[rank, "pending"] == ((3,), floats(3, 3, 3))
        assert found[rank, "view of pending"] == ((2, 1), floats(3, 3))
        assert found[rank, "pending shard"] == ((2,), floats(3, 3))


def test_a_pending_collective_in_a_selectively_checkpointed_part_is_a_counted_drop(
    peer: Peer, job_env: dict[str, str], tmp_path: Path
) -> None:
    """What was saved is found by counting operations: a wait of ours would come before the job's own."""
    run_group(
        """
        from functools import partial
        from torch.distributed import _functional_collectives as functional
        from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

        def policy(context, operation, *args, **kwargs):
            saved = operation is torch.ops._c10d_functional.all_reduce.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        def part(x):
            total = functional.all_reduce(x.detach() * (rank + 1), "sum", dist.group.WORLD)
            capd_client.capture(total, tensor_name="pending")
            capd_client.capture(total + 0, tensor_name="done")
            return (x * total).sin()

        x = torch.full((3,), 2.0, requires_grad=True)
        contexts = partial(create_selective_checkpoint_contexts, policy)
        checkpoint(part, x, use_reentrant=False, context_fn=contexts).sum().backward()
        assert torch.equal(x.grad, 6 * torch.full((3,), 12.0).cos())
        assert capd_client.flush(30)
        assert capd_client.counters()["dropped"] == {"unsupported": 1}
        """,
        job_env,
        tmp_path,
    )
    assert [(r.key.tensor_name, r.data) for r in peer.records] == [("done", floats(6, 6, 6))] * 2


TRAIN = """
    import hashlib
    if rank == 1 and os.environ["CAPD_ENDPOINT"] != "off":
        os.environ["CAPD_ENDPOINT"] = "unix:/nowhere/s"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    if rank == 0:
        capd_client.watch(model, steps="0-3,5")
    for step in range(8):
        for micro_batch in range(2):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
        if rank == 1 and step % 3 == 1:
            for _ in range(step):
                capd_client.capture(loss.detach(), tensor_name="loss")
        if rank == 0:
            capd_client.flush(10)
        optimizer.step()
        optimizer.zero_grad()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(json.dumps([hashlib.sha256(weights).hexdigest(), loss.item().hex(), torch.rand(1).item().hex()]))
    print(json.dumps(capd_client.counters()))
"""


@pytest.mark.fault
def test_ranks_that_capture_unevenly_neither_hang_nor_add_a_collective(
    peer: Peer, job_env: dict[str, str], tmp_path: Path
) -> None:
    """A collective of ours would meet one of the job's on the other rank. Rank 1 has no daemon."""
    captured = run_group(
        TRAIN, job_env | {"CAPD_POLICY": "block", "CAPD_MAX_BLOCK_MS": "50"}, tmp_path, "captured"
    )
    plain = run_group(TRAIN, job_env | {"CAPD_ENDPOINT": "off"}, tmp_path, "plain")

    results, counters = zip(*(map(json.loads, said.splitlines()) for said in captured), strict=True)
    assert list(results) == [json.loads(said.splitlines()[0]) for said in plain]
    assert results[0][0] == results[1][0], "both ranks end with the same weights"
    assert {record.key.rank for record in peer.records} == {0}
    assert counters[0]["committed"] == counters[0]["offered"] == len(peer.records) > 50
    assert counters[1]["offered"] == 12 == counters[1]["in_flight"] + sum(counters[1]["dropped"].values())
