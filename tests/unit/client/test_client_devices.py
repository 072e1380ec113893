"""The devices of a session: set up once, ahead of the first capture where `watch` asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from client_peer import Peer, wait_until
from fake_device import KEY, FakeDevice, Rig

from capd_client import devices, pinning, rests
from capd_client.counter_page import DropReason
from capd_client.device import DeviceStager
from capd_client.pacing import Pace
from capd_client.session import Session

CUDA = [torch.device("cuda", index) for index in range(2)]


class Machine:
    """Two fake GPUs; `capturing` says whether a graph is being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[torch.device, FakeDevice] = {}
        self.pinned_for: list[torch.device] = []
        self.capturing = False
        self.fault: Exception | None = None
        monkeypatch.setattr(devices, "CudaDevice", self._make)
        monkeypatch.setattr(devices, "is_capturing", lambda: self.capturing)
        self.compiled: list[tuple[torch.device, str]] = []
        monkeypatch.setattr(devices, "prepare", self._compile)
        monkeypatch.setattr(pinning, "pin", lambda address, nbytes, device: self.pinned_for.append(device))
        monkeypatch.setattr(pinning, "unpin", lambda *_: None)
        monkeypatch.setattr(devices, "take_thread", lambda device: None)

    def _compile(self, device: torch.device, cancelled: Callable[[], bool]) -> None:
        self.compiled.append((device, threading.current_thread().name))
        wait_until(cancelled)

    def _make(self, device: torch.device, is_pinned: Callable[[], bool]) -> FakeDevice:
        if self.fault is not None:
            raise self.fault
        assert device not in self.made
        self.made[device] = FakeDevice()
        return self.made[device]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_each_device_is_set_up_once_and_the_arena_is_pinned_once(
    peer: Peer, make_session: Callable[..., Session], machine: Machine
) -> None:
    session = make_session()
    session.prepare([torch.device("cpu"), *CUDA, torch.device("meta")])
    session.prepare(CUDA)
    assert list(machine.made) == CUDA
    wait_until(lambda: machine.pinned_for)
    stagers = [session.devices.stager(device) for device in CUDA]
    assert all(isinstance(stager, DeviceStager) for stager in stagers)
    assert stagers[0] is not stagers[1]
    wait_until(lambda: len(machine.compiled) == 2)
    session.close()  # compiling is left off
    assert machine.pinned_for == CUDA[:1]
    assert sorted(machine.compiled, key=str) == [(device, "capd-compile") for device in CUDA]


def test_a_signal_handler_that_captures_while_its_thread_sets_the_device_up_is_refused(
    peer: Peer, make_session: Callable[..., Session], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    found: list[object] = []
    make = machine._make

    def interrupted(device: torch.device, is_pinned: Callable[[], bool]) -> FakeDevice:
        found.append(session.devices.stager(device))
        return make(device, is_pinned)

    monkeypatch.setattr(devices, "CudaDevice", interrupted)
    thread = threading.Thread(target=lambda: found.append(session.devices.stager(CUDA[0])), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [DropReason.INTERNAL, session.devices.stager(CUDA[0])]
    assert list(machine.made) == CUDA[:1]


def test_threads_that_capture_first_at_the_same_time_share_one_stager(
    peer: Peer, make_session: Callable[..., Session], machine: Machine
) -> None:
    session = make_session()
    found: list[object] = []
    barrier = threading.Barrier(8)

    def first() -> None:
        barrier.wait()
        found.append(session.devices.stager(CUDA[0]))

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_while_a_graph_is_captured_nothing_is_set_up_and_later_it_is(
    peer: Peer, make_session: Callable[..., Session], machine: Machine
) -> None:
    session = make_session()
    machine.capturing = True
    session.prepare(CUDA)
    assert session.devices.stager(CUDA[0]) is DropReason.STREAM_CAPTURE
    assert machine.made == {}
    machine.capturing = False
    assert isinstance(session.devices.stager(CUDA[0]), DeviceStager)


def test_a_device_that_cannot_be_set_up_is_one_warning_and_the_other_works(
    peer: Peer, make_session: Callable[..., Session], machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    session = make_session(strict=True)
    machine.fault = RuntimeError("CUDA error: initialization error")
    session.prepare(CUDA[:1])
    machine.fault = None
    session.prepare(CUDA)
    assert session.devices.stager(CUDA[0]) is DropReason.INTERNAL
    assert isinstance(session.devices.stager(CUDA[1]), DeviceStager)
    assert caplog.text.count("cuda:0 cannot be captured: CUDA error: initialization error") == 1


def test_after_close_nothing_is_set_up(
    peer: Peer, make_session: Callable[..., Session], machine: Machine
) -> None:
    session = make_session()
    session.close()
    session.prepare(CUDA)
    assert machine.made == {}


def test_a_capture_ends_a_long_rest_of_the_thread(
    peer: Peer, rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rests, "IDLE_TICK_S", 60.0)
    r = rig()
    for count in (1, 2):
        wait_until(lambda: r.session.transport._doze.dozing, 60)
        r.offer(torch.full((4,), float(count)))
        r.started(count)
        r.device.run_all()
        assert r.session.flush(10)
    assert r.session.snapshot().committed == 2


def test_the_thread_looks_often_only_while_copies_wait_for_their_turn(
    peer: Peer, rig: Callable[..., Rig]
) -> None:
    r = rig(FakeDevice(nbytes=1 << 20), by_hand=True)
    assert not r.stager.pressed
    r.offer(torch.zeros(1024))
    r.stager.advance()
    assert r.stager.pending
    assert not r.stager.pressed  # it is under way, and there is room
    r.offer(torch.zeros(600 << 10, dtype=torch.uint8))
    assert r.stager.pressed
    r.finish()
    assert not r.stager.pressed
    r.stager._pace = Pace(1e-3)
    r.stager._pace.spend(1 << 30)
    r.offer(torch.zeros(600 << 10, dtype=torch.uint8))
    r.stager.advance()
    assert not r.stager.pressed  # looking does not help: they may not go yet
    r.stager._pace.lift()
    r.finish()
    r.session.offer(torch.zeros(4), KEY, r.session.context.moment())
    assert r.session.flush(10)
