"""Layouts, casts and sizes of CUDA tensors: each arrives bit for bit, and no call waits for the device."""

from __future__ import annotations

import os

import pytest

from tests.kit.gpu.job import Job

# By name. Odd lengths are not aligned to anything; the permuted ones are dense in another order than C's.
TENSORS = """
def tensors():
    generator = torch.Generator("cuda").manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool):
        name = str(dtype)[6:]
        base = (torch.randn(64, 96, 17, device="cuda", generator=generator) * 50).to(dtype)
        yield f"{name}-plain", base.clone()
        yield f"{name}-odd", base.flatten()[:4097].clone()
        yield f"{name}-transposed", base[:, :, 0].clone().t()
        yield f"{name}-permuted", base.clone().permute(2, 0, 1)
        yield f"{name}-heads", base.clone().transpose(1, 2)
        yield f"{name}-strided", base.clone()[::2, 1::3]
        yield f"{name}-offset", base.clone()[3:]
        yield f"{name}-expanded", base[:1, :, :1].clone().expand(7, 96, 5)
        yield f"{name}-empty", base[:0].clone()
        yield f"{name}-scalar", base[0, 0, 0].clone()
    large = torch.randn(1 << 20, device="cuda", generator=generator)
    yield "large-plain", large.clone()
    yield "large-transposed", large.clone().view(1024, 1024).t()
"""

OVERWRITTEN = (
    TENSORS
    + """
ready()
for n in range(4):
    for name, tensor in tensors():
        hold(tensor, name, n)
        capture(tensor, name, n)
        tensor.untyped_storage().fill_(7)  # of whatever it is a view
        tensor.untyped_storage().resize_(0)
assert not drained()["dropped"]
save()
"""
)


def test_every_layout_arrives_as_it_was(job: Job) -> None:
    job.run(OVERWRITTEN).assert_as_held()


CASTS = """
from capd_client.protocol.key import Key, Moment
ready()
torch.manual_seed(3)
def cast(tensor, name, n, dtype):  # as under autocast
    hold(tensor.to(dtype), name, n)
    key = Key(quant_type=name, rank=0, tensor_name=name)
    session().offer(tensor, key, Moment(iteration=n), cast_to=dtype)
for n, shape in enumerate([(5, 1), (300, 401), (1024, 1024)]):
    source = torch.randn(shape, device="cuda") * 1e3
    source.view(-1)[:3] = torch.tensor([float("inf"), 1e30, -0.0], device="cuda")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        name = f"as-{str(dtype)[6:]}"
        cast(source, name, n, dtype)
        cast(source.t(), name + "-transposed", n, dtype)
        cast(source[::2], name + "-strided", n, dtype)
    cast(source.to(torch.bfloat16), "as-float32", n, torch.float32)
    source.zero_()
assert not drained()["dropped"]
save()
"""


def test_a_cast_on_the_device_is_torchs_own(job: Job) -> None:
    job.run(CASTS).assert_as_held()


# The debug mode of torch knows copies and waits for streams. It does not know loads of kernels, cudaMalloc, copies
# from pageable memory, page locks and new events: what waits for the device is shown by the clock alone. All that is
# captured meanwhile fits into the ring.
BUSY = (
    TENSORS
    + """
ready()
made = [*tensors(), *((f"size-{nbytes}", torch.ones(nbytes // 4, device="cuda")) for nbytes in SIZES)]
for name, tensor in made:
    capture(tensor, name, 0)  # whatever is needed once is loaded, and made, by now
    hold(tensor, name, 0)
drained()
slow, busy = {}, torch.cuda.Event()
torch.cuda.synchronize()
torch.cuda._sleep(4_000_000_000)  # about two seconds
busy.record()
for name, tensor in made:
    started = time.perf_counter()
    capture(tensor, name, 1)
    slow[name] = time.perf_counter() - started
assert not busy.query(), "the device was done before the host: nothing was shown"
assert sum(slow.values()) < SOON_S, sorted(slow.items(), key=lambda item: -item[1])[:5]
for name, tensor in made:
    hold(tensor, name, 1)
assert not drained()["dropped"]
save()
"""
)
SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)


def test_no_call_waits_for_a_device_that_is_busy(job: Job) -> None:
    job.run(BUSY.replace("SIZES", str(SIZES))).assert_as_held()


PARTS = """
ready()
ring = capacity()
whole = torch.arange(3 * ring // 4 + 1000, device="cuda", dtype=torch.int32)
hold(whole, "whole", 0)
capture(whole, "whole", 0)
whole.add_(1)
square = torch.arange(int((ring // 2) ** 0.5) ** 2, device="cuda", dtype=torch.int32)
square = square.view(int(len(square) ** 0.5), -1).t()
hold(square, "transposed", 0)
capture(square, "transposed", 0)
square.zero_()
after = torch.ones(70_000, device="cuda")
hold(after, "after", 0)
capture(after, "after", 0)
assert not drained()["dropped"]
save()
"""


def test_what_is_larger_than_the_ring_comes_in_parts(job: Job) -> None:
    """Three times and twice the ring's largest tensor, each changed right behind its capture."""
    job.run(PARTS, max_block_ms="60000").assert_as_held()


THREADS = """
import concurrent.futures
ready()
def work(thread):
    with torch.cuda.stream(torch.cuda.Stream()):
        generator = torch.Generator("cuda").manual_seed(thread)
        for n in range(60):
            tensor = torch.randn((7, 4000, 300_000)[n % 3] + thread, device="cuda", generator=generator)
            copy = tensor.clone()
            capture(tensor, f"of{thread}", n)
            tensor.zero_()
            tensor.untyped_storage().resize_(0)
            yield (f"of{thread}", n), copy
        torch.cuda.current_stream().synchronize()
with concurrent.futures.ThreadPoolExecutor(6) as pool:
    for copies in pool.map(lambda thread: list(work(thread)), range(6)):
        HELD.update(copies)
assert not drained()["dropped"]
save()
"""


def test_threads_with_streams_of_their_own_share_a_device(job: Job) -> None:
    captured = job.run(THREADS)
    captured.assert_as_held()
    assert len(captured.tensors) == 360


ARENA = """
ready()
arena = session().arena
grown(arena.nbytes - arena.start)
assert arena.populated == arena.nbytes
count = arena.nbytes // CHUNK + 4  # more than it holds
tensor = torch.empty(CHUNK // 4, device="cuda", dtype=torch.int32)
for n in range(count):
    tensor.fill_(n)
    capture(tensor, "t", n)
assert not drained(90)["dropped"]
print(count)
"""


@pytest.mark.parametrize(("gib", "chunk"), [(4, 256 << 20)])
def test_an_arena_above_two_gibibytes_is_locked_and_used_to_its_end(job: Job, gib: float, chunk: int) -> None:
    """Larger than what some kernels lock at once."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < 3 * gib * (1 << 30):
        pytest.skip(f"needs {3 * gib} GiB of free host memory, {available / (1 << 30):.1f} are there")
    captured = job.run(ARENA.replace("CHUNK", str(chunk)), arena_bytes=str(int(gib * (1 << 30))))
    assert len(captured.tensors) == int(captured.output.split()[-1])
    for (_, n), tensor in captured.tensors.items():
        assert tensor.numel() == chunk // 4
        assert bool((tensor == n).all()), n
