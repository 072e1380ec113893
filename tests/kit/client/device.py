"""A device for tests, which delays and reorders what it is asked to do, and a session that captures from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from capd_client.arena.allocator import Slot
from capd_client.device.pieces import Piece
from capd_client.device.ring import RingMemory
from capd_client.device.snapshots import DeviceStager
from capd_client.devstats import fill_row
from capd_client.protocol.key import Key
from capd_client.rules.slices import Slice
from capd_client.session.session import Session
from capd_client.staging.border import Border
from capd_client.staging.describe import Described
from capd_client.staging.stager import Stager
from tests.kit.client.peer import wait_until

KEY = Key(quant_type="fp32", rank=0, tensor_name="x")


@dataclass(eq=False)
class FakeEvent:
    happened: bool = False


@dataclass
class FakeDevice:
    """Takes snapshots at once and copies to the host only when `run` is called, in the order it is told.

    ready: whether what the training thread issued is done at once. `issued` are the events that it recorded, on the
    stream `current`. A stream that waits for a copy has it done first, as the order of the device would have it.
    """

    nbytes: int = 1 << 15  # too small for slabs: a copy for each capture
    capturing: bool = False
    pinned: bool = True
    ready: bool = True
    current: int = 0
    issues: bool = True  # on training threads
    fetches: list[tuple[torch.Tensor, torch.Tensor, Sequence[FakeEvent]]] = field(default_factory=list)
    marks: list[tuple[int, FakeEvent]] = field(default_factory=list)
    issued: list[FakeEvent] = field(default_factory=list)
    recycled: list[FakeEvent] = field(default_factory=list)
    entered: list[str] = field(default_factory=list)
    fetched_by: list[str] = field(default_factory=list)
    computed_by: list[str] = field(default_factory=list)
    prepared_by: list[str] = field(default_factory=list)
    held_back: list[tuple[int, FakeEvent]] = field(default_factory=list)
    fault: Exception | None = None
    running: threading.Lock = field(default_factory=threading.Lock)

    def warm(self, *, rows: bool) -> None:
        pass

    def prepare_rows(self, cancelled: Callable[[], bool], may_load: Callable[[], bool]) -> None:
        self.may_load = may_load
        self.prepared_by.append(threading.current_thread().name)
        wait_until(cancelled)

    def is_capturing(self) -> bool:
        return self.capturing

    def part_end(self, offset: int) -> int:
        return 1 << 62 if self.pinned else 0

    def allocate_ring(self) -> torch.Tensor:
        return self.allocate(self.nbytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def stream(self) -> int:
        return self.current

    def copy(self, memory: RingMemory, slot: Slot, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        memory.write(slot, tensor, dtype)

    def record(self) -> FakeEvent:
        event = FakeEvent(self.ready)
        self.issued.append(event)
        return event

    def hold_back(self, event: FakeEvent) -> None:
        self.held_back.append((self.current, event))
        self.run_until(event)

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread().name)

    def compute(
        self, segments: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[FakeEvent]
    ) -> None:
        assert all(event.happened for event in after)
        self.computed_by.append(threading.current_thread().name)
        for flat, row in segments:
            fill_row(flat, row)

    def fetch(self, piece: Piece, arena: torch.Tensor) -> None:
        source, host, after = piece.source, piece.target(arena), piece.after
        assert source.numel() == host.numel() == piece.nbytes
        if self.fault is not None:
            raise self.fault
        if not piece.pinned:  # this one would wait for them
            assert all(event.happened for event in after)
            host.copy_(source)
        self.fetched_by.append(threading.current_thread().name)
        self.fetches.append((source, host, after))

    def fetched(self) -> FakeEvent:
        event = FakeEvent(happened=not self.pinned)
        self.marks.append((len(self.fetches), event))
        return event

    def can_issue(self) -> bool:
        return self.issues

    def query(self, event: FakeEvent) -> bool:
        return event.happened

    def wait(self, event: FakeEvent) -> None:
        time.sleep(0.001)

    def recycle(self, event: FakeEvent) -> None:
        assert event.happened
        self.recycled.append(event)

    def run(self, index: int) -> None:
        """Perform the copies behind the index-th event."""
        first = self.marks[index - 1][0] if index else 0
        last, event = self.marks[index]
        for source, host, after in self.fetches[first:last]:
            assert all(event.happened for event in after)
            host.copy_(source)
        event.happened = True

    def run_all(self) -> None:
        """Perform every copy not performed yet, in order; once each, where several threads call it."""
        with self.running:  # a second, later copy would go to a slot that is another capture's by then
            for index, (_, event) in enumerate(self.marks):
                if not event.happened:
                    self.run(index)

    def run_until(self, event: FakeEvent) -> None:
        """Perform the copies up to an event, in order."""
        with self.running:
            for index, (_, mark) in enumerate(self.marks):
                if not mark.happened:
                    self.run(index)
                if mark is event:
                    break

    @property
    def sizes(self) -> list[int]:
        """Bytes of each copy so far."""
        return [source.numel() for source, _, _ in self.fetches]


class AlwaysDevice(Stager):
    """Sends CPU tensors the way of device tensors."""

    def put_known(self, *_: object) -> bool:
        return False

    def put(self, described: Described) -> None:
        self._from_device.take(described)


@dataclass
class Rig:
    """A session with a fake device. Without `by_hand` its copy pump advances the stager.

    way: what device tensors are put to. border: takes CPU tensors as if they were on the device.
    """

    session: Session
    device: FakeDevice
    stager: DeviceStager
    way: Stager
    border: Border

    def offer(
        self,
        tensor: torch.Tensor,
        cast_to: torch.dtype | None = None,
        *,
        key: Key = KEY,
        take: Slice | None = None,
        immutable: bool = False,
    ) -> None:
        """Offer a CPU tensor as if it were on the fake device."""
        moment = self.session.context.moment()
        self.border.offer(tensor, key, moment, cast_to=cast_to, take=take, immutable=immutable)

    def started(self, count: int) -> None:
        """Wait until so many copies were issued."""
        wait_until(lambda: len(self.device.marks) >= count)

    def finish(self) -> None:
        """By hand: issue and perform everything."""
        while self.stager.pending:
            self.stager.advance()
            self.device.run_all()
