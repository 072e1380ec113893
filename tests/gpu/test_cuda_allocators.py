"""Allocators, launches and ways to keep a snapshot: whatever of torch and capd is chosen, the bits are the same."""

from __future__ import annotations

import pytest

from tests.kit.gpu.job import Job, same_bits

# Memory that is freed right behind its capture goes to the next tensor, or back to the driver.
CHURN = """
ready()
generator = torch.Generator("cuda").manual_seed(4)
others = [torch.cuda.Stream() for _ in range(2)]
for n in range(120):
    size = (100, 5_000, 300_000, 2_000_000)[n % 4] + n
    with torch.cuda.stream(others[n % 2]) if n % 3 == 0 else torch.cuda.stream(None):
        tensor = torch.randn(size, device="cuda", generator=generator)
        kept = tensor.clone()
        capture(tensor, "t", n)
        tensor.fill_(float("nan"))
        del tensor
        HELD["t", n] = kept
    if n % 40 == 39:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
assert not drained()["dropped"]
save()
"""
ENVIRONMENTS = {
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "blocking launches": {"CUDA_LAUNCH_BLOCKING": "1"},
    "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "eager loading": {"CUDA_MODULE_LOADING": "EAGER"},
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_freed_and_reused_memory_under_each_allocator(job: Job, environment: str) -> None:
    job.environment.update(ENVIRONMENTS[environment])
    job.run(CHURN).assert_as_held()


# What autograd keeps is held instead of copied; what the job changes is found out, and is a snapshot from then on.
AUTO = """
from torch import nn
from capd_client.device.snapshots import DeviceStager
ready()
torch.manual_seed(6)
hold_it, held_by = DeviceStager.hold, []
def counted(self, tensor, capture, *, lent=False):
    held_by.append((capture.definition.key.module, capture.definition.key.tensor_name, lent))
    return hold_it(self, tensor, capture, lent=lent)
DeviceStager.hold = counted

class Spoiled(nn.Linear):
    def forward(self, x):
        return super().forward(x)

def run(name, layer, spoil):
    for step in range(6):
        x = torch.randn(4096, 256, device="cuda", requires_grad=True)
        if spoil:
            torch.cuda._sleep(200_000_000)  # the copy comes after what overwrites it
        y = layer(x)
        hold(x, name, "input", step)
        hold(y, name, "output", step)
        if spoil:
            y.detach().zero_()  # right behind its capture
        y.sum().backward()
        layer.zero_grad()
        torch.cuda.synchronize()
        drained()
        capd_client.set_moment(iteration=step + 1)

capd_client.set_moment(iteration=0)
model = nn.ModuleDict({"kept": nn.Linear(256, 512), "spoiled": Spoiled(256, 512)}).cuda()
capd_client.watch(model, steps="all", tensors=("input", "output"))
run("kept", model["kept"], False)
capd_client.set_moment(iteration=0)
run("spoiled", model["spoiled"], True)
dropped = drained()["dropped"]
assert set(dropped) <= {"mutated"}, dropped
assert sum(dropped.values()) == 1, dropped  # once its class is known, snapshots are taken
assert held_by.count(("kept", "input", True)) == held_by.count(("kept", "output", True)) == 6, held_by
assert held_by.count(("spoiled", "output", True)) == 1, held_by
save()
"""


def test_what_is_held_instead_of_copied_has_the_same_bits_or_is_counted(job: Job) -> None:
    held = job.run(AUTO, snapshot="auto").held
    found = job.by_module()
    assert held.keys() - found.keys() == {("spoiled", "output", 0)}
    assert found.keys() <= held.keys()
    for key, tensor in found.items():
        assert same_bits(tensor, held[key]), key
