"""The page lock of an arena: in chunks as it grows, in a thread that nobody waits for, whatever the driver answers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from capd_client.arena import arena as arena_module
from capd_client.arena.arena import STEP_NBYTES, Arena
from capd_client.device.cuda import pinning
from capd_client.device.cuda.pinning import Pinning
from capd_client.process.log import RateLimitedLog
from capd_client.session.session import Session
from tests.kit.client.cuda import Gpus
from tests.kit.client.peer import Peer, wait_until

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    arena.grow(arena.nbytes)
    yield arena
    arena.close()


class Driver:
    """Stands for the registration: waits while `busy` is set, notes what happened in which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: str | None = None) -> None:
        self.events: list[str] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self._problem = problem
        monkeypatch.setattr(pinning, "pin", self._pin)
        monkeypatch.setattr(pinning, "unpin", lambda *_: self.events.append("unpin"))

    def _pin(self, address: int, nbytes: int, device: torch.device) -> str | None:
        self.threads.add(threading.current_thread().name)
        self.events.append("pin")
        assert self.go.wait(30)
        return self._problem

    def release(self) -> None:
        self.events.append("release")


def ended() -> bool:
    return not any(thread.name == "capd-pin" for thread in threading.enumerate())


def test_it_is_done_once_in_a_thread_of_its_own_behind_prefaulting(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    driver = Driver(monkeypatch)
    pin = Pinning(arena, RateLimitedLog())
    assert not pin.pinned()
    pin.start(DEVICE)
    pin.start(torch.device("cuda", 0))
    wait_until(pin.pinned)
    assert arena.populated == arena.nbytes
    assert driver.events == ["pin"]
    assert driver.threads == {"capd-pin"}

    pin.close(driver.release)
    assert driver.events == ["pin", "unpin", "release"]
    assert ended()


@pytest.mark.parametrize("problem", ["cudaHostRegister failed with error 2", None])
def test_a_failure_is_one_warning_and_nothing_to_undo(
    monkeypatch: pytest.MonkeyPatch, arena: Arena, problem: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(monkeypatch, problem)
    if problem is None:

        def broken(*_: object) -> None:
            raise RuntimeError("CUDA driver error: initialization failed")

        monkeypatch.setattr(pinning, "pin", broken)
    pin = Pinning(arena, RateLimitedLog())
    pin.start(DEVICE)
    wait_until(ended)

    assert not pin.pinned()
    assert "the arena is not pinned" in caplog.text
    pin.close(driver.release)
    assert driver.events[-1] == "release"
    assert "unpin" not in driver.events


def test_leaving_does_not_wait_for_a_lock_that_takes_long_and_it_is_undone_later(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    monkeypatch.setattr(pinning, "_JOIN_S", 0.01)
    driver = Driver(monkeypatch)
    driver.go.clear()
    pin = Pinning(arena, RateLimitedLog())
    pin.start(DEVICE)
    wait_until(lambda: driver.events)

    pin.close(driver.release)
    assert driver.events == ["pin"]  # registering cannot be interrupted, and nobody waits for it
    driver.go.set()
    wait_until(ended)
    assert driver.events == ["pin", "unpin", "release"]


def test_closed_before_the_pages_are_there_it_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 20)  # nobody makes them
    driver = Driver(monkeypatch)
    pin = Pinning(arena, RateLimitedLog())
    pin.start(DEVICE)
    pin.close(lambda: (driver.release(), arena.close()))  # type: ignore[func-returns-value]
    assert ended()
    assert driver.events == ["release"]
    pin.start(DEVICE)
    assert ended()


def test_the_lock_follows_the_growth_in_parts_and_is_taken_again_of_fresh_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: Gpus
) -> None:
    arena = Arena(4 * STEP_NBYTES)
    first = arena.address + arena.start
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", -1)  # nobody needs the pages here
    parts: list[tuple[int, int]] = []
    monkeypatch.setattr(pinning, "pin", lambda address, nbytes, _: parts.append((address, nbytes)))
    monkeypatch.setattr(
        pinning, "unpin", lambda address, _: parts.remove(next(p for p in parts if p[0] == address))
    )
    pin = Pinning(arena, RateLimitedLog())
    pin.start(DEVICE)
    arena.grow(1)
    wait_until(pin.pinned)
    assert parts == [(first, STEP_NBYTES)]
    assert pin.part_end(arena.start + 5) == arena.start + STEP_NBYTES
    assert pin.part_end(arena.start + STEP_NBYTES) == 0

    arena.grow(3 * STEP_NBYTES)
    wait_until(lambda: len(parts) == 2)
    wait_until(pin.pinned)
    assert parts == [(first, STEP_NBYTES), (first + STEP_NBYTES, 2 * STEP_NBYTES)]
    assert pin.part_end(arena.start + STEP_NBYTES) == arena.start + 3 * STEP_NBYTES

    with pin.lifted() as lifted:
        assert lifted
        assert parts == []
        assert pin.part_end(arena.start) == 0
        arena.replace([(0, 4096)], lambda _: None)
    arena.free_old()
    arena.grow(1)
    wait_until(pin.pinned)
    assert parts == [(first, STEP_NBYTES)]
    pin.close(arena.close)
    assert parts == []


class Parts:
    """Stands for the driver: which parts of an arena, as (begin, end) from its start on, are registered just now.

    It refuses what begins at `refused`. times: when each registration began and ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
        self.first = arena.address + arena.start
        self.locked: list[tuple[int, int]] = []
        self.unlocked: list[int] = []
        self.times: list[tuple[float, float]] = []
        self.takes_s = 0.0
        self.refused = -1
        monkeypatch.setattr(pinning, "pin", self._pin)
        monkeypatch.setattr(pinning, "unpin", self._unpin)

    def _pin(self, address: int, nbytes: int, device: torch.device) -> str | None:
        started, begin = time.monotonic(), address - self.first
        time.sleep(self.takes_s)
        self.times.append((started, time.monotonic()))
        if begin == self.refused:
            return "cudaHostRegister failed with error 2"
        self.locked.append((begin, begin + nbytes))
        return None

    def _unpin(self, address: int, device: torch.device) -> None:
        begin = address - self.first
        self.unlocked.append(begin)
        self.locked.remove(next(part for part in self.locked if part[0] == begin))


class Growing(Arena):
    """An arena whose pages are there as far as the test says, without being made."""

    def have(self, populated: int, target: int) -> None:
        with self.grown:
            self.populated, self.target = self.start + populated, self.start + target
            self.grown.notify_all()


@pytest.fixture
def growing() -> Iterator[Growing]:
    arena = Growing(10 * STEP_NBYTES)
    yield arena
    arena.close()


CHUNK = 2 * STEP_NBYTES


def test_a_chunk_is_locked_and_used_as_soon_as_its_pages_are_there(
    monkeypatch: pytest.MonkeyPatch, growing: Growing
) -> None:
    driver, start = Parts(monkeypatch, growing), growing.start
    pin = Pinning(growing, RateLimitedLog(), chunk_nbytes=CHUNK)
    pin.start(DEVICE)
    growing.have(CHUNK + STEP_NBYTES, 3 * CHUNK)
    wait_until(lambda: pin.part_end(start))
    assert driver.locked == [(0, CHUNK)]  # the step after it waits for the rest of its chunk
    assert pin.part_end(start) == pin.part_end(start + CHUNK - 1) == start + CHUNK
    assert pin.part_end(start - 1) == pin.part_end(start + CHUNK) == 0
    assert not pin.pinned()

    growing.have(2 * CHUNK + STEP_NBYTES, 2 * CHUNK + STEP_NBYTES)  # no more is to come
    wait_until(pin.pinned)
    assert driver.locked == [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK + STEP_NBYTES)]
    assert [pin.part_end(start + at) - start for at in (CHUNK - 1, CHUNK, 2 * CHUNK)] == [
        CHUNK, 2 * CHUNK, 2 * CHUNK + STEP_NBYTES,
    ]  # fmt: skip

    pin.close(driver.unlocked.clear)  # called last
    assert (driver.locked, driver.unlocked) == ([], [])


def test_the_first_chunk_is_locked_while_the_pages_of_the_next_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena(2 * STEP_NBYTES)
    driver, make = Parts(monkeypatch, arena), arena._libc.madvise
    pin = Pinning(arena, RateLimitedLog(), chunk_nbytes=STEP_NBYTES)
    locked_by_then: list[bool] = []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        if address == driver.first + STEP_NBYTES:
            wait_until(lambda: driver.locked)
            locked_by_then.append(True)
        return int(make(address, nbytes, advice))

    arena._libc.madvise = madvise
    pin.start(DEVICE)
    arena.grow(arena.nbytes)
    wait_until(lambda: pin.part_end(arena.nbytes - 1))
    pin.close(arena.close)
    assert locked_by_then == [True]


def test_parts_are_undone_in_reverse(monkeypatch: pytest.MonkeyPatch, growing: Growing) -> None:
    driver = Parts(monkeypatch, growing)
    pin = Pinning(growing, RateLimitedLog(), chunk_nbytes=CHUNK)
    pin.start(DEVICE)
    growing.have(3 * CHUNK, 3 * CHUNK)
    wait_until(pin.pinned)
    pin.close(lambda: None)
    assert driver.unlocked == [2 * CHUNK, CHUNK, 0]


def test_between_two_parts_there_is_a_pause_as_long_as_locking_took_which_leaving_cuts_short(
    monkeypatch: pytest.MonkeyPatch, growing: Growing
) -> None:
    driver = Parts(monkeypatch, growing)
    driver.takes_s = 0.1
    pin = Pinning(growing, RateLimitedLog(), chunk_nbytes=CHUNK)
    pin.start(DEVICE)
    growing.have(3 * CHUNK, 3 * CHUNK)
    wait_until(pin.pinned)
    ((_, first), (second, until), (third, _)) = driver.times
    assert min(second - first, third - until) > 0.09
    pin.close(lambda: None)
    assert ended()

    driver.takes_s, pin = 2.0, Pinning(growing, RateLimitedLog(), chunk_nbytes=CHUNK)
    pin.start(DEVICE)
    wait_until(lambda: pin.part_end(growing.start))
    started = time.monotonic()
    pin.close(lambda: None)
    assert time.monotonic() - started < 1.2
    assert driver.locked == []


def test_a_chunk_that_the_driver_refuses_is_one_notice_and_what_is_locked_stays_so(
    monkeypatch: pytest.MonkeyPatch, growing: Growing, caplog: pytest.LogCaptureFixture
) -> None:
    driver, start = Parts(monkeypatch, growing), growing.start
    driver.refused = CHUNK
    pin = Pinning(growing, RateLimitedLog(), chunk_nbytes=CHUNK)
    pin.start(DEVICE)
    growing.have(3 * CHUNK, 3 * CHUNK)
    wait_until(lambda: "only the first 64 MiB of the arena are pinned" in caplog.text)
    growing.have(4 * CHUNK, 4 * CHUNK)
    assert driver.locked == [(0, CHUNK)]
    assert (pin.part_end(start), pin.part_end(start + CHUNK)) == (start + CHUNK, 0)
    assert not pin.pinned()

    with pin.lifted() as lifted:
        assert lifted
        assert driver.locked == []
        growing.have(0, 0)
    growing.have(3 * CHUNK, 3 * CHUNK)
    wait_until(lambda: driver.locked)
    assert driver.locked == [(0, CHUNK)]  # as far as the driver allowed, and not asked again
    assert len(driver.times) == 3
    assert len(caplog.records) == 1
    pin.close(lambda: None)
    assert driver.locked == []
    assert ended()


def test_no_part_is_as_large_as_two_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Growing(5 << 30)
    driver = Parts(monkeypatch, arena)
    pin = Pinning(arena, RateLimitedLog(), chunk_nbytes=4 << 30)
    pin.start(DEVICE)
    arena.have(5 << 30, 5 << 30)
    wait_until(lambda: pin.part_end(arena.start + (4 << 30)))
    largest = max(end - begin for begin, end in driver.locked)
    pin.close(arena.close)
    assert 10**9 < largest < 2 * 10**9


def test_what_an_error_left_unlocked_is_locked_again(
    monkeypatch: pytest.MonkeyPatch, growing: Growing
) -> None:
    driver = Parts(monkeypatch, growing)
    pin = Pinning(growing, RateLimitedLog(), chunk_nbytes=CHUNK)
    pin.start(DEVICE)
    growing.have(CHUNK, CHUNK)
    wait_until(pin.pinned)
    with pytest.raises(OSError, match="gone"), pin.lifted():
        raise OSError("the daemon is gone")
    wait_until(pin.pinned)
    assert driver.locked == [(0, CHUNK)]
    pin.close(lambda: None)


def test_what_is_being_locked_is_not_unlocked_meanwhile(
    monkeypatch: pytest.MonkeyPatch, arena: Arena
) -> None:
    driver = Driver(monkeypatch)
    driver.go.clear()
    pin = Pinning(arena, RateLimitedLog())
    pin.start(DEVICE)
    wait_until(lambda: driver.events)
    with pin.lifted() as lifted:
        assert not lifted
    driver.go.set()
    wait_until(pin.pinned)
    pin.close(driver.release)
    assert driver.events == ["pin", "unpin", "release"]


@pytest.mark.slow
def test_a_job_that_ends_while_its_arena_is_being_locked_ends_at_once(
    peer: Peer, job_env: dict[str, str]
) -> None:
    code = """
import threading, torch, capd_client
from capd_client.device.cuda import pinning
begun = threading.Event()
def pin(*_):
    begun.set()
    threading.Event().wait()
pinning.pin = pin
capd_client.capture(torch.ones(4), tensor_name="x")
capd_client.api.session().devices._pinning.start(torch.device("cuda"))
assert begun.wait(30)
"""
    subprocess.run([sys.executable, "-c", code], env=job_env, check=True, timeout=60)
    wait_until(lambda: peer.byes == 1)


def test_a_session_unmaps_its_arena_behind_the_undone_lock(
    peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_JOIN_S", 0.01)
    driver = Driver(monkeypatch)
    session = make_session()
    start = f"{session.arena.address:x}-"

    def is_mapped() -> bool:
        return any(line.startswith(start) for line in Path("/proc/self/maps").read_text().splitlines())

    mapped: list[bool] = []
    monkeypatch.setattr(pinning, "unpin", lambda *_: mapped.append(is_mapped()))
    driver.go.clear()
    session.devices._pinning.start(DEVICE)
    wait_until(lambda: driver.events)
    session.close()
    assert is_mapped()
    driver.go.set()
    wait_until(ended)
    assert mapped == [True]
    assert not is_mapped()


def test_a_page_lock_that_cannot_be_undone_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, gpus: Gpus, arena: Arena
) -> None:
    """After a device error every call may raise, and that error is the job's to tell."""
    pin = Pinning(arena, RateLimitedLog())
    pin.start(DEVICE)
    wait_until(pin.pinned)

    def broken(address: int) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(gpus, "cudaHostUnregister", broken)
    released: list[bool] = []
    pin.close(lambda: released.append(True))
    assert released == [True]
