"""CUDA tensors through the real device path: exact, without a host synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kit.gpu.job import Job

Same = Callable[[torch.Tensor, torch.Tensor], bool]

HAZARDS = """
generator = torch.Generator("cuda").manual_seed(1)
sizes = [(3,), (64, 64), (512, 1024), (1025, 1023), ()]
BEGIN
held = {}
torch.cuda.set_sync_debug_mode("error")
for n in range(100):
    for index, shape in enumerate(sizes):
        tensor = torch.randn(shape, device="cuda", generator=generator, dtype=torch.float32).to(torch.bfloat16)
        if n % 20 == 0:
            held[f"t{index}", n] = tensor.clone()
        capture(tensor, f"t{index}", n)
        tensor.zero_()  # an in-place write right behind the capture
        tensor.untyped_storage().resize_(0)  # and its memory is gone, for the next one to take
    if n == 50:
        begun.set()
torch.cuda.set_sync_debug_mode("default")
assert not drained()["dropped"]
torch.save({key: tensor.cpu() for key, tensor in held.items()}, "held.pt")
END
"""
READY = """
begun = threading.Event()
ready()
"""
# The page lock is held back until half of the captures are made, and is taken amid the others.
UNLOCKED = """
from capd_client.device.cuda import pinning
pin, begun = pinning.pin, threading.Event()
def held_back(*args):
    begun.wait(60)
    return pin(*args)
pinning.pin = held_back
from capd_client.device.cuda.device import CudaDevice
fetch, unpinned = CudaDevice.fetch, []
def counted(self, piece, arena):
    if not piece.pinned:
        unpinned.append(piece.nbytes)
    fetch(self, piece, arena)
CudaDevice.fetch = counted
session().prepare([torch.device("cuda", 0)])
assert not session().devices.pinned
"""
LOCKED_IN_THE_END = """
assert unpinned
ready()
assert session().devices.pinned
"""
BEGINNINGS = {"ready": (READY, ""), "unlocked": (UNLOCKED, LOCKED_IN_THE_END)}


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_tensors_arrive_as_they_were_whatever_happens_to_them_and_no_call_waits(
    job: Job, same: Same, begin: str
) -> None:
    """Also right behind the start, while copies go where nothing is locked yet."""
    first, last = BEGINNINGS[begin]
    captured = job.run(HAZARDS.replace("BEGIN", first).replace("END", last))

    assert len(captured.tensors) == 500
    held = torch.load(job.directory / "held.pt", weights_only=True)
    assert len(held) == 25
    for key, tensor in held.items():
        assert same(captured.tensors[key], tensor), key


BACKWARD = """
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
capd_client.watch(model[3], steps="all", tensors=("input", "output", "grad_output"))
held = {}
def keep(name, step, tensor):
    held[name, step] = tensor.detach().clone()
torch.cuda.set_sync_debug_mode("error")
for step in range(5):
    hidden = model[2](model[1](model[0](x)))
    keep("input", step, hidden)
    output = model[3](hidden)
    keep("output", step, output)
    output.register_hook(lambda gradient: keep("grad_output", step, gradient))  # in autograd's thread, as capd's
    output.float().square().mean().backward()
    hidden.detach().zero_()
    output.detach().zero_()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.set_sync_debug_mode("default")
assert not drained()["dropped"]
torch.save({key: tensor.cpu() for key, tensor in held.items()}, "held.pt")
"""


def test_a_watched_layer_in_training_forward_and_backward(job: Job, same: Same) -> None:
    captured = job.run(BACKWARD)
    held = torch.load(job.directory / "held.pt", weights_only=True)
    assert captured.tensors.keys() == held.keys()
    assert len(held) == 15
    for key, tensor in held.items():
        assert same(captured.tensors[key], tensor), key


PINNED = """
ready()
arena = session().arena
assert session().devices.pinned
there = (arena.start, arena.populated - 1)
first_and_last = [torch.frombuffer(arena.buffer, dtype=torch.uint8, count=1, offset=at) for at in there]
assert all(byte.is_pinned() for byte in first_and_last)
capture(torch.ones(100_000, device="cuda"), "x")
assert not drained()["dropped"]
"""


def test_all_pages_of_the_arena_are_locked_in_the_background(job: Job) -> None:
    assert "not pinned" not in job.run(PINNED).output


SMALL = """
from capd_client.device.cuda.device import CudaDevice
ready()
fetch, copies, all_wait = CudaDevice.fetch, [], threading.Event()
def counted(self, piece, arena):
    if threading.current_thread().name == "capd-copies":
        all_wait.wait()
    copies.append(piece.nbytes)
    fetch(self, piece, arena)
CudaDevice.fetch = counted
tensors = [torch.full((1 + n % 500,), float(n), device="cuda") for n in range(2000)]
for n, tensor in enumerate(tensors):
    capture(tensor, "t", n)
all_wait.set()
assert not drained()["dropped"]
assert len(copies) < 20, copies
"""


def test_small_captures_share_copies(job: Job, same: Same) -> None:
    captured = job.run(SMALL)
    for n in range(2000):
        assert same(captured.tensors["t", n], torch.full((1 + n % 500,), float(n)))


ASSERTED = """
import os
ready()
capture(torch.ones(100_000, device="cuda"), "before")
drained()
table = torch.zeros(4, device="cuda")
bad = table[torch.tensor([7], device="cuda")]  # a kernel of the job's meets a failed assertion
for n in range(3):
    capture(bad, "bad", n)  # does not raise
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "device-side assert" in str(error), error
else:
    raise SystemExit("the job was not told of its error")
capture(torch.ones(100_000), "after")
counters = drained()
assert counters["dropped"] == {"internal": 3}, counters
capd_client.close()
print("told")
sys.stdout.flush()
os._exit(0)  # what torch makes of the error while the interpreter ends is its own affair
"""


def test_an_error_on_the_device_is_the_jobs_to_tell_and_costs_its_captures_alone(job: Job) -> None:
    captured = job.run("import sys\n" + ASSERTED)
    assert captured.output.endswith("told\n")
    assert set(captured.tensors) == {("before", 0), ("after", 0)}


TWO = """
devices = [torch.device("cuda", index) for index in range(2)]
def work(device, sign):
    for n in range(1, 200):
        capture(torch.full((n,), float(sign * n), device=device), f"on{device.index}", n)
threads = [threading.Thread(target=work, args=(device, 1 - 2 * device.index)) for device in devices]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not drained()["dropped"]
assert torch.cuda.current_device() == 0
"""


@pytest.mark.usefixtures("two_gpus")
def test_two_devices_in_two_threads(job: Job, same: Same) -> None:
    captured = job.run(TWO)
    for n in range(1, 200):
        assert same(captured.tensors["on0", n], torch.full((n,), float(n)))
        assert same(captured.tensors["on1", n], torch.full((n,), -float(n)))


OTHERS = """
torch.cuda.set_device(1)
tensor = torch.ones(100_000, device="cuda")
ready(1)
for n in range(10):
    capture(tensor, "t", n)
assert not drained()["dropped"]
capd_client.close()
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_makes_no_context_on_another_ranks_gpu(job: Job) -> None:
    assert len(job.run(OTHERS).tensors) == 10
