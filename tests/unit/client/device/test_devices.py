"""The devices of a session: set up once, ahead of the first capture where `watch` asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from capd_client.device import devices
from capd_client.device.cuda import pinning
from capd_client.device.snapshots import DeviceStager
from capd_client.protocol.counter_page import DropReason
from capd_client.rules.schema import RuleSettings
from capd_client.session.session import Session
from tests.kit.client.device import KEY, AlwaysDevice, FakeDevice
from tests.kit.client.peer import Peer, wait_until

CUDA = [torch.device("cuda", index) for index in range(2)]


class Machine:
    """Two fake GPUs; `capturing` says whether a graph is being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[torch.device, FakeDevice] = {}
        self.pinned_for: list[torch.device] = []
        self.capturing = False
        self.fault: Exception | None = None
        monkeypatch.setattr(devices, "CudaDevice", self._make)
        monkeypatch.setattr(devices, "is_capturing", lambda device: self.capturing)
        monkeypatch.setattr(pinning, "pin", lambda address, nbytes, device: self.pinned_for.append(device))
        monkeypatch.setattr(pinning, "unpin", lambda *_: None)

    def _make(self, device: torch.device, *_: object, **__: object) -> FakeDevice:
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
    session.close()
    assert machine.pinned_for == CUDA[:1]
    assert not any(
        device.prepared_by for device in machine.made.values()
    )  # the daemon computes the statistics of what is kept
    assert not [thread for thread in threading.enumerate() if thread.name == "capd-copies"]


@pytest.mark.parametrize("settings", [{"mode": "stats"}, {"rules": (RuleSettings(store="stats"),)}])
def test_kernels_are_compiled_where_statistics_alone_are_kept(
    peer: Peer, make_session: Callable[..., Session], machine: Machine, settings: dict[str, Any]
) -> None:
    session = make_session(**settings)
    session.prepare(CUDA)
    wait_until(lambda: all(device.prepared_by for device in machine.made.values()))
    session.close()  # compiling is left off
    assert [device.prepared_by for device in machine.made.values()] == [["capd-compile"]] * 2


def test_no_module_is_loaded_in_the_first_steps(
    peer: Peer, make_session: Callable[..., Session], machine: Machine
) -> None:
    session = make_session(mode="stats")
    session.prepare(CUDA[:1])
    [device] = machine.made.values()
    wait_until(lambda: device.prepared_by)
    found = [device.may_load()]
    for step in range(5):
        session.context.set_moment(iteration=step + 1)
        found.append(device.may_load())
    assert found == [True, False, False, False, True, True]


def test_a_signal_handler_that_captures_while_its_thread_sets_the_device_up_is_refused(
    peer: Peer, make_session: Callable[..., Session], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    found: list[object] = []
    make = machine._make

    def interrupted(device: torch.device, *_: object, **__: object) -> FakeDevice:
        found.append(session.devices.stager(device))
        return make(device)

    monkeypatch.setattr(devices, "CudaDevice", interrupted)
    thread = threading.Thread(target=lambda: found.append(session.devices.stager(CUDA[0])), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [DropReason.INTERRUPTED, session.devices.stager(CUDA[0])]
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


def test_no_lock_is_undone_while_a_copy_is_under_way(
    peer: Peer, make_session: Callable[..., Session], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone: list[int] = []
    session = make_session()
    session.prepare(CUDA[:1])
    wait_until(lambda: session.devices.pinned)
    monkeypatch.setattr(pinning, "unpin", lambda address, _: undone.append(address))
    stager = session.devices.stager(CUDA[0])
    assert isinstance(stager, DeviceStager)
    stager._pump.stop()
    session._stager = AlwaysDevice(session.queue, session.arena, session.notices, lambda _: stager)
    session.offer(torch.ones(64), KEY, session.context.moment())
    stager.advance()
    with session.devices.unlocked() as unlocked:
        assert not unlocked
        session.offer(torch.ones(64), KEY, session.context.moment())  # and nobody waits meanwhile
    assert undone == []
    while stager.pending:
        stager.advance()
        machine.made[CUDA[0]].run_all()
    with session.devices.unlocked() as unlocked:
        assert unlocked
        assert undone
