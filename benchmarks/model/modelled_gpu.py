"""A GPU in the time of a model: two streams, a copy engine, and the host's cost of each call.

A stream works in order. So the time of an event is known as soon as it is issued.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch

from benchmarks.model.virtual_time import Clock, Task

__all__ = ["GPUS", "Constants", "FreeGpu", "Happening", "ModelledGpu", "Rounds"]


@dataclass(frozen=True)
class Constants:
    """The constants of a GPU and its host, named as in benchmarks/gpu/gpu_constants.py, which measures them.

    The defaults are estimates from sources and from others' figures. docs/measurements.md lists the origins.
    """

    current_stream_us: float = 2.0
    raw_stream_us: float = 0.1
    capture_check_us: float = 0.5
    event_record_us: float = 3.0
    event_query_us: float = 1.0
    wait_event_us: float = 3.0
    copy_d2d_call_us: float = 5.0
    d2h_call_us: float = 5.0
    event_wake_us: float = 50.0
    # The same copies by calls of CUDA's runtime without torch.
    raw_copy_us: float = 2.5
    # A record and a wait by calls of CUDA's runtime.
    raw_event_us: float = 1.5
    # capd's own code for a capture, measured here.
    python_us: float = 0.0
    # capd's own code for a copy that its thread issues, measured here.
    issue_python_us: float = 0.0
    # Two launches of a statistics kernel, on the training thread.
    row_host_us: float = 37.0
    # Copied bytes. Each is read and written.
    d2d_gbps: float = 1500.0
    d2h_64_mib_gbps: float = 55.0
    # A statistics kernel, 0.2 ms of 64 MiB.
    row_gbps: float = 335.0
    # The time in which the link begins a copy.
    copy_gap_us: float = 1.5
    # The slowdown of a kernel, by the share of the memory's rate that the link takes.
    held_slowdown: float = 0.3

    @classmethod
    def of(cls, measured: dict[str, float], **known: float) -> Constants:
        """Return the constants with the measured values instead of the estimates."""
        names = {field.name for field in fields(cls)}
        return cls(**{**known, **{name: value for name, value in measured.items() if name in names}})


GPUS = {
    "A100": {"d2d_gbps": 850.0, "d2h_64_mib_gbps": 25.0},
    "H100": {"d2d_gbps": 1500.0, "d2h_64_mib_gbps": 55.0},
    "H200": {"d2d_gbps": 2150.0, "d2h_64_mib_gbps": 55.0},
}


class Happening:
    """An event: `at` is when it happens, in µs."""

    def __init__(self, at: float) -> None:
        self.at = at


@dataclass
class Rounds:
    """The delays of the pump's thread. After each wait it takes `us` to get the interpreter. A share takes longer."""

    us: float
    late_share: float = 0.0
    late_us: float = 5000.0

    def __post_init__(self) -> None:
        self._random = random.Random(7)

    def draw(self) -> float:
        return self.us + (self.late_us if self._random.random() < self.late_share else 0.0)


class ModelledGpu:
    """The seam of capd_client.device.seam in a model's time.

    It also fits the seam of November 2026, which had `is_pinned` and no `wait`.
    """

    def __init__(
        self, clock: Clock, constants: Constants, rounds: Rounds, ring_nbytes: int, *, raw: bool = False
    ) -> None:
        self.clock = clock
        # Whether calls bypass torch.
        self.raw = raw
        self.constants = constants
        self.rounds = rounds
        self.ring_nbytes = ring_nbytes
        # The time at which the training stream will be idle.
        self.training = 0.0
        self.side = 0.0
        # In µs.
        self.link_busy = 0.0
        self.link_bytes = 0
        # The µs in which bytes waited for the link or were copied.
        self.link_wanted = 0.0
        self.task: Task | None = None

    # -- the benchmark's part ---------------------------------------------------------------------------

    def compute(self, us: float) -> None:
        """Run a kernel of the job on the training stream."""
        self.training = max(self.training, self.clock.task.now) + us  # type: ignore[union-attr]

    def writes(self, nbytes: int) -> None:
        """Write a snapshot of `nbytes` into the ring."""
        self.clock.spend(self.constants.copy_d2d_call_us)
        self.compute(nbytes / self.constants.d2d_gbps / 1e3)

    def computes_row(self, nbytes: int) -> None:
        """Run a statistics kernel on the training stream."""
        self.clock.spend(self.constants.row_host_us)
        self.compute(nbytes / self.constants.row_gbps / 1e3 + 10)

    # -- the seam ---------------------------------------------------------------------------------------

    def is_pinned(self, host: torch.Tensor) -> bool:
        return True

    def part_end(self, offset: int) -> int:
        return 1 << 62

    def is_capturing(self) -> bool:
        self.clock.spend(self.constants.capture_check_us)
        return False

    def allocate_ring(self) -> torch.Tensor:
        return self.allocate(self.ring_nbytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def stream(self) -> int:
        self.clock.spend(self.constants.raw_stream_us)
        return 0

    def copy(self, memory: Any, slot: Any, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.clock.spend(self.constants.raw_copy_us if self.raw else self.constants.copy_d2d_call_us)
        self.compute(tensor.nbytes / self.constants.d2d_gbps / 1e3)

    def record(self) -> Happening:
        self._spend_event(self.constants.event_record_us + self.constants.current_stream_us)
        return Happening(self.training)

    def hold_back(self, event: Happening) -> None:
        self._spend_event(self.constants.wait_event_us + self.constants.raw_stream_us)
        self.training = max(self.training, event.at)

    def _spend_event(self, by_torch_us: float) -> None:
        self.clock.spend(self.constants.raw_event_us if self.raw else by_torch_us)

    def enter_thread(self) -> None:
        self.task = self.clock.enter("pump")

    def fetch(self, piece: Any, arena: torch.Tensor, *older: Any, **_: Any) -> None:
        """Copy a piece. In a tree before pieces, copy its bytes to their place after the events to wait for."""
        nbytes, after = (piece.numel(), older[0]) if older else (piece.nbytes, piece.after)
        constants, here = self.constants, self.clock.task
        assert here is not None
        begun, ready = here.now, max([event.at for event in after], default=0.0)
        if here is not self.task:
            self.clock.spend(constants.issue_python_us)
        self.clock.spend(constants.raw_copy_us if self.raw else constants.d2h_call_us)
        for _event in after:
            self._spend_event(constants.wait_event_us)
        start = max(self.side, here.now, ready)
        took = nbytes / constants.d2h_64_mib_gbps / 1e3 + constants.copy_gap_us
        # The link was needed from the moment the bytes were ready. It was idle until this call.
        self.link_wanted += took + max(0.0, begun - max(self.side, ready))
        self.side = start + took
        self.link_busy += took
        self.link_bytes += nbytes

    def fetched(self) -> Happening:
        self._spend_event(self.constants.event_record_us)
        return Happening(self.side)

    def can_issue(self) -> bool:
        return self.raw

    def query(self, event: Happening) -> bool:
        self.clock.spend(self.constants.event_query_us)
        here = self.clock.task
        return here is not None and event.at <= here.now

    def wait(self, event: Happening) -> None:
        here = self.clock.task
        assert here is not None
        self.clock.rest(max(0.0, event.at - here.now) + self.constants.event_wake_us + self.rounds.draw())

    def recycle(self, event: Happening) -> None:
        pass


class FreeGpu(ModelledGpu):
    """A GPU that finishes everything at once and costs nothing, not even the model's own time."""

    def is_capturing(self) -> bool:
        return False

    def stream(self) -> int:
        return 0

    def writes(self, nbytes: int) -> None:
        pass

    def copy(self, *_: object) -> None:
        pass

    def can_issue(self) -> bool:
        return True

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def record(self) -> Happening:
        return _HAPPENED

    def fetch(self, *_: object, **__: object) -> None:
        pass

    def fetched(self) -> Happening:
        return _HAPPENED

    def query(self, event: Happening) -> bool:
        return True


_HAPPENED = Happening(0.0)
