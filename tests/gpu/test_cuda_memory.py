"""Memory and link of a GPU: the ring is all that capd takes, tensors may be held instead, copies keep to a rate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.kit.gpu.job import Job

Same = Callable[[torch.Tensor, torch.Tensor], bool]

MEMORY = """
ready()
capture(torch.zeros(8, device="cuda"), "warm-up")
drained()
before = torch.cuda.memory_allocated()
for n in range(1000):
    tensor = torch.full((1, 300, 1 << 18)[n % 3:][:1], float(n), device="cuda")
    capture(tensor, "t", n)
del tensor
assert not drained()["dropped"]
assert torch.cuda.memory_allocated() == before, (torch.cuda.memory_allocated(), before)
"""


def test_device_memory_is_flat_over_a_thousand_captures(job: Job) -> None:
    captured = job.run(MEMORY)
    assert len(captured.tensors) == 1001
    for n in (0, 1, 2, 997, 998, 999):
        assert bool((captured.tensors["t", n] == float(n)).all())


WATCH = """
model = torch.nn.Linear(64, 64).cuda()
x = torch.randn(8, 64, device="cuda")
model(x).sum().backward()  # the library's workspace comes with the first product
before = torch.cuda.memory_allocated()
free = torch.cuda.mem_get_info()[0]
capd_client.watch(model)
ready()
ring = torch.cuda.memory_allocated() - before
assert 0 < ring <= min(256 << 20, free // 20) + (1 << 20), ring  # the tables of the statistics' kernel beside it
model(x).sum().backward()
assert not drained()["dropped"]
assert torch.cuda.memory_allocated() - before - ring < 1 << 20  # the job's own tensors, and no more
"""


def test_the_ring_is_allocated_at_watch(job: Job) -> None:
    captured = job.run(WATCH, steps="0")
    assert {name for name, _ in captured.tensors} == {"input", "weight", "output", "grad_output"}


IMMUTABLE = """
ready()
before = torch.cuda.memory_allocated()
large = torch.arange(80 << 20, device="cuda", dtype=torch.int32)  # 320 MiB, more than any ring
torch.cuda.set_sync_debug_mode("error")
capture(large, "large", immutable=True)
capture(large[:65536].view(256, 256).t(), "strided", immutable=True)
torch.cuda.set_sync_debug_mode("default")
counters = drained()
assert not counters["dropped"], counters
changed = torch.ones(64 << 20, device="cuda")
capture(changed, "changed", immutable=True)
changed.zero_()
counters = drained()
assert counters["dropped"] == {"mutated": 1}, counters
del large, changed
time.sleep(0.1)
assert torch.cuda.memory_allocated() == before, torch.cuda.memory_allocated() - before
"""


def test_immutable_tensors_are_copied_from_where_they_are(job: Job, same: Same) -> None:
    captured = job.run(IMMUTABLE)
    whole = torch.arange(80 << 20, dtype=torch.int32)
    assert same(captured.tensors["large", 0], whole)
    assert same(captured.tensors["strided", 0], whole[:65536].view(256, 256).t())
    assert ("changed", 0) not in captured.tensors


PACED = """
ready()
tensor = torch.zeros(8 << 20, device="cuda")
torch.cuda.synchronize()
started = time.monotonic()
for n in range(16):
    capture(tensor, "t", n)
assert not drained()["dropped"]
seconds, nbytes = time.monotonic() - started, 15 * tensor.nbytes  # the last copy is let go, and then paid for
assert seconds >= nbytes / 1e9 - 0.01, seconds
"""


def test_copies_keep_to_the_rate_that_is_allowed(job: Job) -> None:
    assert len(job.run(PACED, max_d2h_gbps="1").tensors) == 16
