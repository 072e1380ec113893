"""What must not go wrong around captures on a GPU: races, graph captures, failed page locks, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tests.kit.gpu.job import Job, python_path

Same = Callable[[torch.Tensor, torch.Tensor], bool]

# The sanitizer sees what one thread does through torch's dispatcher, so the stager is driven by hand, on the side
# stream as the client thread is. It knows events and streams but no queries of events: no copy is done before the end,
# so that no memory is used twice.
SANITIZED = """
import sys, torch
from capd_client.arena.allocator import SlotAllocator
from capd_client.arena.arena import Arena
from capd_client.inflight.queue import Queue
from capd_client.inflight.counters import Counters
from capd_client.device.cuda.device import CudaDevice
from capd_client.device.snapshots import DeviceStager
from capd_client.protocol.key import Key, Moment
from capd_client.process.log import RateLimitedLog
from capd_client.device.pacing import Pace
from capd_client.protocol.messages import Descriptor

class Slow(CudaDevice):
    done = False

    def query(self, event):
        return self.done and super().query(event)

class Careless(Slow):
    def fetch(self, piece, arena):
        piece.after = ()  # does not wait for the snapshot
        super().fetch(piece, arena)

arena = Arena(64 << 20)
queue = Queue(SlotAllocator(arena.start, arena.nbytes - arena.start), Counters())
device = (Careless if sys.argv[1] == "careless" else Slow)(
    torch.device("cuda", 0), lambda _: 64 << 20, lambda: False, RateLimitedLog()
)
stager = DeviceStager(device, queue, arena.buffer, pace=Pace(None))

def advance():
    with torch.cuda.stream(device._stream):
        stager.advance()

definition = queue.definitions.make(Key(quant_type="fp32", rank=0, tensor_name="x"), torch.float32, None)
other = torch.cuda.Stream()
for n in range(20):
    tensor = torch.full((70_000,), float(n), device="cuda")
    for immutable in (False, True):
        if n % 2:
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other if n % 2 else torch.cuda.current_stream()):
            descriptor = Descriptor(0, 0, tensor.nbytes, definition.id, tuple(tensor.shape), Moment())
            capture = queue.admit(definition, descriptor)
            if immutable:
                assert stager.hold(tensor, capture) is None
            else:
                assert stager.snapshot(tensor, capture, tensor.dtype, 0.0) is None
    advance()
torch.cuda.synchronize()
device.done = True
while stager.pending:
    advance()
print("clean")
"""


@pytest.mark.parametrize("kind", ["as it is", "careless"])
def test_the_sanitizer_finds_no_missing_wait_between_streams(kind: str) -> None:
    """And it would: without the wait for the snapshot it reports a race."""
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, kind],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if kind == "careless":
        assert done.returncode != 0
        assert "data race" in done.stdout + done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("clean\n")


GRAPH = """
ready()
busy, graphed = torch.cuda.Stream(), torch.cuda.Stream()
static = torch.zeros(1024, device="cuda")
result = torch.zeros(1024, device="cuda")
# A kernel is loaded at its first launch, which waits for all that is queued: each of these is launched once before.
result.copy_(static + 1)
capture(torch.full((70_000,), 0.0, device="cuda"), "first")
capture(static, "first", 1)
drained()
torch.cuda.synchronize()
for attempt in range(3):
    with torch.cuda.stream(busy):
        torch.cuda._sleep(4_000_000_000)  # about two seconds: the captures behind it stay pending
        for n in range(50):
            capture(torch.full((70_000,), float(n), device="cuda"), "pending", attempt * 50 + n)
    graph = torch.cuda.CUDAGraph()
    assert capd_client.counters()["in_flight"] >= 50
    with torch.cuda.stream(graphed):
        graph.capture_begin(capture_error_mode="global")
        for _ in range(10):
            result.copy_(static + 1)
            capture(static, "inside", attempt)
            time.sleep(0.02)  # the client thread looks for its events meanwhile
        graph.capture_end()
    assert capd_client.counters()["in_flight"] >= 50  # they were pending all the time
    static.fill_(attempt)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((result == attempt + 1).all())
    counters = drained()
    assert counters["dropped"] == {"stream_capture": 10 * (attempt + 1)}, counters
"""


def test_graph_captures_of_other_threads_survive_pending_captures(job: Job, same: Same) -> None:
    captured = job.run(GRAPH)
    assert len(captured.tensors) == 152
    for n in range(150):
        assert same(captured.tensors["pending", n], torch.full((70_000,), float(n % 50)))


STATIC = """
x = torch.zeros(4096, device="cuda")
tap = capd_client.static_tap(x, tensor_name="y")
capd_client.capture(x, tensor_name="warm")  # the device is set up outside of the graph
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
    tap.copy(y)
    y.zero_()
for step in range(20):
    x.fill_(step)
    graph.replay()
    tap.after_replay(iteration=step)
assert not drained()["dropped"]
"""


def test_a_static_tap_gives_what_each_replay_computed(job: Job, same: Same) -> None:
    captured = job.run(STATIC)
    for step in range(20):
        assert same(captured.tensors["y", step], torch.full((4096,), 2.0 * step))


UNPINNED = """
import logging
logging.basicConfig()
from capd_client.device.cuda import pinning
from capd_client.device.cuda.runtime import cuda_runtimes, pin
from capd_client.device.cuda.device import CudaDevice
arena = session().arena
# The job has locked the arena itself, so that the driver refuses capd's lock. It leaves no error behind.
assert int(torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 0)) == 0
assert "712" in pin(arena.address, arena.nbytes, torch.device("cuda", 0))
assert cuda_runtimes()
assert [runtime.cudaPeekAtLastError() for runtime in cuda_runtimes()] == [0] * len(cuda_runtimes())
assert int(torch.cuda.cudart().cudaHostUnregister(arena.address)) == 0
# Refused without such a lock, so that the memory is pageable in truth.
pinning.pin = lambda *_: "it was refused"
fetch, seen = CudaDevice.fetch, []
def watched(self, piece, arena):
    seen.append(piece.pinned)
    fetch(self, piece, arena)
CudaDevice.fetch = watched
session().prepare([torch.device("cuda", 0)])
for thread in threading.enumerate():
    if thread.name == "capd-pin":
        thread.join()
assert not session().devices.pinned
for n in range(50):
    tensor = torch.full((70_000 + n,), float(n), device="cuda")
    capture(tensor, "t", n)
    tensor.zero_()
assert not drained()["dropped"]
assert seen and not any(seen), seen
probe = torch.frombuffer(arena.buffer, dtype=torch.uint8, count=1, offset=arena.start)
assert not probe.is_pinned()
torch.cuda.synchronize()
"""


def test_a_failed_page_lock_costs_speed_and_nothing_else(job: Job, same: Same) -> None:
    captured = job.run(UNPINNED, arena_bytes=str(256 << 20))
    assert "the arena is not pinned" in captured.output
    for n in range(50):
        assert same(captured.tensors["t", n], torch.full((70_000 + n,), float(n)))


ENDLESS = """
n = 0
while True:
    for size in (1000, 3 << 20, 20 << 20):
        capture(torch.full((size,), float(n), device="cuda"), f"t{size}", n)
    n += 1
    if n == 3:
        print("going", flush=True)
"""


def test_of_a_rank_killed_amid_its_copies_only_whole_tensors_are_read(job: Job) -> None:
    process = job.start(ENDLESS)
    try:
        assert process.stdout is not None
        assert "going\n" in process.stdout
        time.sleep(1.0)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    tensors = job.stored()
    assert len(tensors) >= 3
    for (name, n), tensor in tensors.items():
        assert tensor.numel() == int(name[1:])
        assert bool((tensor == float(n)).all()), (name, n)
