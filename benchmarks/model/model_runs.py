"""The runs of capd's device path in the time of a model: one training thread, one GPU, and the pump."""

from __future__ import annotations

import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

import capd_client
from benchmarks.kit.common import percentile
from benchmarks.model.modelled_gpu import Constants, FreeGpu, ModelledGpu, Rounds
from benchmarks.model.virtual_time import Clock
from capd_client.api import session
from capd_client.arena.allocator import SlotAllocator
from capd_client.device import pieces
from capd_client.device.holding import Holding
from capd_client.device.pacing import Pace
from capd_client.device.snapshots import DeviceStager
from capd_client.inflight.counters import Counters
from capd_client.inflight.queue import Queue
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Descriptor
from capd_client.staging.describe import Described
from capd_client.staging.drop_log import DropLog
from capd_client.staging.from_device import FromDevice
from capd_client.staging.stager import Stager

__all__ = ["MIB", "Result", "Scene", "python_us", "run"]

MIB = 1 << 20
# Addresses only: nothing is written there.
_ARENA_NBYTES = 16 << 30
_RING_NBYTES = 256 * MIB
# MAP_NORESERVE of Linux. Python has the name from 3.13 on.
_NO_RESERVE = 0x4000
_POLL_US = 100.0
_MANY_PIECES = 128
_PIECE_NBYTES = pieces.PIECE_NBYTES


@dataclass(frozen=True)
class Scene:
    """A job: it has `steps` steps of `step_us` without captures, and captures `tensors` tensors of `nbytes` in each.

    Attributes:
        lead_us: The host's time for the job's own calls between two captures.
        held: Whether the tensors are held.
        piece_nbytes: The bytes of one copy to the host. None: the code's own value.
    """

    tensors: int
    nbytes: int
    step_us: float
    steps: int = 4
    lead_us: float = 20.0
    held: bool = False
    piece_nbytes: int | None = None


@dataclass(frozen=True)
class Result:
    """The result of a scene.

    Attributes:
        host_us: The median host time of one capture.
        step: The time of a step, relative to one without captures.
        link_busy: The link's busy share of the time in which bytes waited for it. The start of each copy counts as
            busy.
    """

    host_us: float
    step: float
    link_busy: float


def run(scene: Scene, constants: Constants, rounds: Rounds, *, raw: bool = False) -> Result:
    """Run a scene to its end under policy block. At the end of each step the host waits for the device."""
    pieces.PIECE_NBYTES = scene.piece_nbytes or _PIECE_NBYTES
    clock = Clock()
    gpu = ModelledGpu(clock, constants, rounds, _RING_NBYTES, raw=raw)
    training = clock.enter("training")
    rank = _Rank(gpu, held=scene.held)
    rank.bring_home()
    tensor = torch.empty(scene.nbytes // 2, dtype=torch.bfloat16, device="meta")
    costs, started = [], training.now
    for step in range(scene.steps):
        for _ in range(scene.tensors):
            gpu.compute(scene.step_us / scene.tensors)
            clock.spend(scene.lead_us)
            rank.wait_for_room(scene.nbytes)
            begun = training.now
            clock.spend(constants.python_us)
            rank.capture(tensor, step)
            costs.append(training.now - begun)
            clock.rest(0.0)
            rank.settle()
        clock.rest(max(0.0, gpu.training - training.now))
    took = training.now - started
    rank.finish()
    # The link takes a share of the memory's rate, which the job's kernels also use.
    share = gpu.link_busy / took * constants.d2h_64_mib_gbps / (2 * constants.d2d_gbps)
    bare = scene.steps * max(scene.step_us, scene.lead_us * scene.tensors)
    return Result(
        statistics.median(costs),
        took / bare * (1 + constants.held_slowdown * min(1.0, share)),
        gpu.link_busy / gpu.link_wanted,
    )


def python_us() -> dict[str, float]:
    """Return the µs of capd's own code without calls to a device: for a capture, and for a copy that it issues."""
    small = _capture_us(4096)
    return {"python_us": small, "issue_python_us": max(0.0, _capture_us(8 * MIB) - small)}


def _capture_us(nbytes: int, count: int = 2000) -> float:
    """Measure `capture()` of a tensor that takes a device's path."""
    rank = session()
    assert rank is not None
    gpu = FreeGpu(Clock(), Constants(), Rounds(0.0), _RING_NBYTES)
    stager: Any = DeviceStager(gpu, rank.queue, rank.arena.buffer, pace=Pace(None), ordered=True)
    rank._stager = _FromDevice(rank.queue, rank.arena, rank.notices, lambda _: stager)
    tensor, costs = torch.empty(nbytes, dtype=torch.uint8), []

    for _ in range(count):
        begun = time.perf_counter()
        capd_client.capture(tensor, tensor_name="x", layer_type="linear", component="linear", layer=3)
        costs.append(time.perf_counter() - begun)
        while stager.pending:
            stager.advance()
        rank.queue.acknowledged([(one.descriptor.sequence,) * 2 for one in rank.queue.next_batch(512)])
    # A low percentile is used instead of the median, because others use the machine, too.
    return percentile(costs, 25) * 1e6


class _FromDevice(Stager):
    """A stager that sends the host's tensors along the path of a device's."""

    def put_known(self, *_: object) -> bool:
        return False

    def put(self, described: Described) -> None:
        self._from_device.take(described)


class _Rank:
    """The queue, the stager and the device path of a rank. Its daemon takes ready captures at once."""

    def __init__(self, gpu: ModelledGpu, *, held: bool) -> None:
        self._gpu = gpu
        self._queue = Queue(SlotAllocator(0, _ARENA_NBYTES), Counters())
        buffer = mmap.mmap(-1, _ARENA_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        holding = Holding(_ARENA_NBYTES if held else 0)
        self.stager: Any = DeviceStager(
            gpu, self._queue, buffer, pace=Pace(None), ordered=True, holding=holding
        )
        self._way = FromDevice(
            self._queue, DropLog(RateLimitedLog(), self._queue.policy), lambda _: self.stager
        )
        key = Key(quant_type="bf16", rank=0, tensor_name="input", module="layers.0.mlp")
        self._definition = self._queue.definitions.make(key, torch.bfloat16, None)

    def wait_for_room(self, nbytes: int) -> None:
        """Wait on the host if its stream cannot wait: its threads issue nothing, or very many copies are pending."""
        while self._lacks_room(nbytes):
            self._gpu.clock.rest(_POLL_US)

    def _lacks_room(self, nbytes: int) -> bool:
        if self.stager._ring._slots.free_nbytes >= nbytes + (1 << 13):
            return False
        if not self._gpu.raw:
            return True
        transfers = self.stager.transfers
        return len(transfers._under_way) - transfers._landed >= _MANY_PIECES and not transfers.free_landed()

    def capture(self, tensor: torch.Tensor, step: int) -> None:
        """Capture the tensor once."""
        descriptor = Descriptor(0, 0, tensor.nbytes, self._definition.id, tuple(tensor.shape), Moment(step))
        self._way.take(Described(tensor, tensor.dtype, self._definition, descriptor, False))
        dropped = self._queue.snapshot().dropped
        assert not dropped, dropped

    def settle(self) -> None:
        """Let the daemon take the ready captures."""
        while batch := self._queue.next_batch(512):
            self._queue.acknowledged([(one.descriptor.sequence,) * 2 for one in batch])

    def bring_home(self) -> None:
        """Start the pump beside the training thread."""
        clock = self._gpu.clock
        pump = self.stager._pump
        pump._doze, pump._stopping = _Doze(self._gpu), _Stop(self._gpu)
        self.stager.start()
        clock.await_tasks(2)

    def finish(self) -> None:
        """Wait until all bytes are on the host."""
        self.stager.hurry()
        while self.stager.pending:
            self._gpu.clock.rest(_POLL_US)
            self.settle()
        self.stager._pump._stopping.set()
        self.stager._pump._doze.end()
        self._gpu.clock.leave()


class _Doze:
    """capd_client.process.wakeup.Wakeup in the time of the model: the rest of the pump."""

    def __init__(self, gpu: ModelledGpu) -> None:
        self._gpu = gpu
        self.dozing = False

    def wake(self) -> None:
        if self.dozing:
            self.end()

    def end(self) -> None:
        if self._gpu.task is not None:
            self._gpu.clock.wake(self._gpu.task)

    def rest(self, seconds: float, called: Callable[[], bool]) -> None:
        self.dozing = True
        if not called():
            self._gpu.clock.rest(seconds * 1e6, wakeable=True)
            self._gpu.clock.spend(self._gpu.rounds.draw())
        self.dozing = False


class _Stop:
    """The event that ends the pump."""

    def __init__(self, gpu: ModelledGpu) -> None:
        self._gpu = gpu
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> None:
        self._gpu.clock.rest(seconds * 1e6)


def main() -> None:
    """Read scenes and constants as JSON from the standard input. Write the results to the standard output."""
    asked = json.load(sys.stdin)
    measured = python_us()
    capd_client.close(0.0)
    results = []
    for one in asked:
        constants = Constants.of(one["constants"], **measured)
        found = run(Scene(**one["scene"]), constants, Rounds(*one["rounds"]), raw=one["raw"])
        results.append(asdict(found))
    json.dump({"python": measured, "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
