"""Models that something else runs on a GPU: activation checkpointing, graphed callables, sharding."""

from __future__ import annotations

import pytest

from tests.kit.gpu.job import Job, same_bits

TRAINED = """
from torch import nn
import torch.distributed as dist

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def inputs(step):
    generator = torch.Generator("cuda").manual_seed(100 + step)
    return torch.randn(8, 48, device="cuda", generator=generator, requires_grad=True)

def keep_clones(model, step):
    # what the job's own hooks see the first time; a recomputed forward comes by again
    def kept(key, tensor):
        if key not in HELD and torch.is_tensor(tensor):
            hold(tensor, *key)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            def see(module, args, output, name=name):
                kept((name, "input", step[0]), args[0])
                kept((name, "output", step[0]), output)
                if output.requires_grad:
                    output.register_hook(lambda gradient: kept((name, "grad_output", step[0]), gradient))
            module.register_forward_hook(see)

def train(watched):
    torch.manual_seed(9)
    model = nn.ModuleList(Block() for _ in range(2)).cuda()
    step = [0]
    SHARD
    if watched:
        capd_client.watch(model, steps="all", tensors=("input", "output", "grad_output"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    WRAP
    if watched:
        keep_clones(model, step)
    losses = []
    for step[0] in range(5):
        x = inputs(step[0])
        for block in model:
            x = RUN
        loss = x.square().mean()
        loss.backward()
        losses.append(float(loss.detach()).hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses

BEFORE
alone = train(False)
ready()
assert train(True) == alone
counters = drained()
assert not counters["dropped"], counters
AFTER
save()
"""
CHECKPOINTED = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=REENTRANT)"
# Parts of the blocks, whose hooks run around the replays; or blocks, whose parts are replayed by no hook.
GRAPHED_PARTS = """
    for block in model:
        hidden = torch.randn(8, 96, device="cuda", requires_grad=True)
        torch.cuda.make_graphed_callables((block.up, block.down), ((inputs(0),), (hidden,)))
"""
GRAPHED_BLOCKS = """
    for block in model:
        torch.cuda.make_graphed_callables(block, (inputs(0),))
"""
SHARDED = """
    from torch.distributed.fsdp import fully_shard
    for block in model:
        fully_shard(block, mesh=mesh)
"""
# One process is a group of its own.
ALONE = """
import os
torch.cuda.set_device(0)
dist.init_process_group(
    "nccl" if KIND == "cuda" else "gloo", rank=0, world_size=1, init_method="file://" + os.path.abspath("rendezvous")
)
mesh = dist.init_device_mesh(KIND, (1,))
"""


def code(before: str = "", shard: str = "", wrap: str = "", run: str = "block(x)", after: str = "") -> str:
    """The job, with what stands in the place of each word."""
    filled = TRAINED
    for name, text in {
        "BEFORE": before, "SHARD": shard.strip(), "WRAP": wrap.strip(), "RUN": run, "AFTER": after,
    }.items():  # fmt: skip
        filled = filled.replace(name, text)
    return filled


def assert_all_captured(job: Job, script: str) -> None:
    held = job.run(script).held
    found = job.by_module()
    assert len(held) == 3 * 4 * 5
    assert found.keys() == held.keys()
    for key, tensor in held.items():
        assert same_bits(found[key], tensor), key


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_captured_once(job: Job, reentrant: bool) -> None:
    """Its forward runs twice, the second time in the backward."""
    assert_all_captured(job, code(run=CHECKPOINTED.replace("REENTRANT", str(reentrant))))


def test_a_sharded_model_is_captured_whole(job: Job) -> None:
    """fully_shard on a group of one: parameters come and go, activations are the model's own."""
    script = code(before=ALONE, shard=SHARDED, after="dist.destroy_process_group()")
    assert_all_captured(job, script)


def test_graphed_modules_are_captured_around_their_replays(job: Job) -> None:
    """torch refuses to graph modules that have hooks: capd's step aside and come back."""
    assert_all_captured(job, code(wrap=GRAPHED_PARTS))


def test_graphed_modules_run_on_and_one_line_says_that_their_parts_give_nothing(job: Job) -> None:
    before = "import logging\nlogging.basicConfig()"
    captured = job.run(code(before=before, wrap=GRAPHED_BLOCKS))
    assert captured.tensors == {}
    assert captured.output.count("replayed as a CUDA graph") == 1, captured.output
