"""How captures travel from a device to the arena: in pieces, in runs of neighbours, at a limited pace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from capd_client.arena.allocator import SMALL_NBYTES
from capd_client.device import pieces, transfers
from capd_client.device.pacing import Pace
from capd_client.session.session import Session
from tests.kit.client.device import KEY, FakeDevice, Rig
from tests.kit.client.peer import Peer
from tests.kit.tiers import rows

MIB = 1 << 20
MakeRig = Callable[..., Rig]


class Clock:
    """A clock that the test sets, in seconds."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


# -- runs ---------------------------------------------------------------------------------------------------


def test_small_neighbours_share_one_copy_and_one_event(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    tensors = [torch.arange(n, n + 7 + n) for n in range(100)]
    for tensor in tensors:
        r.offer(tensor)
    r.finish()

    assert len(r.device.fetches) == len(r.device.marks) == 1
    assert r.session.flush(10)
    assert peer.data_of("x") == [tensor.numpy().tobytes() for tensor in tensors]
    assert len(r.device.recycled) == len(tensors) + 1


def test_a_thousand_small_captures_over_several_slabs_are_one_copy(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "ISSUE_NBYTES", 1 << 30)
    r = rig(FakeDevice(nbytes=16 * MIB), by_hand=True, arena_bytes=16 * MIB)
    for n in range(1000):
        r.offer(torch.full((1024,), float(n)))  # 4 KiB
    r.finish()

    assert r.device.sizes == [1000 * 4096]
    assert r.session.flush(10)
    first = [data[:4] for data in peer.data_of("x")]
    assert first == [torch.tensor(float(n)).numpy().tobytes() for n in range(1000)]


def test_captures_of_one_run_become_ready_together_and_after_the_one_before(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    for _ in range(3):
        r.offer(torch.ones(4))
    r.stager.advance()
    for _ in range(2):
        r.offer(torch.ones(4))
    r.stager.advance()
    assert len(r.device.marks) == 2

    r.device.run(1)
    assert r.stager.advance() == 0
    r.device.run(0)
    assert r.stager.advance() == 5
    assert r.session.flush(10)


def test_a_capture_from_the_host_between_two_parts_their_copies(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    r.offer(torch.zeros(16))
    r.session.offer(torch.full((16,), 7.0), KEY, r.session.context.moment())  # its slot lies between theirs
    r.offer(torch.zeros(16))
    r.finish()

    assert r.device.sizes == [64, 64]
    assert r.session.flush(10)
    assert peer.data_of("x")[1] == torch.full((16,), 7.0).numpy().tobytes()


def test_large_neighbours_share_a_copy_up_to_the_size_of_a_piece(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 5 * SMALL_NBYTES // 2)
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    for n in range(5):
        r.offer(torch.full((SMALL_NBYTES,), n, dtype=torch.uint8))
    r.finish()

    assert r.device.sizes == [2 * SMALL_NBYTES, 2 * SMALL_NBYTES, SMALL_NBYTES]
    assert r.session.flush(10)
    assert peer.data_of("x") == [bytes([n]) * SMALL_NBYTES for n in range(5)]


def test_no_copy_crosses_from_one_part_of_the_page_lock_into_another(
    peer: Peer, rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses such copies, and then nothing more of that device would be captured."""
    step = 3 * SMALL_NBYTES
    monkeypatch.setattr(pieces, "STEP_NBYTES", step)
    device = FakeDevice(nbytes=MIB)
    r = rig(device, by_hand=True)

    def part_end(offset: int) -> int:  # the second part is not locked yet
        return 0 if offset // step == 1 else (offset // step + 1) * step

    monkeypatch.setattr(device, "part_end", part_end)
    sizes = [
        SMALL_NBYTES + 4096,
        3 * SMALL_NBYTES,
        4,
        SMALL_NBYTES,
        4,
        SMALL_NBYTES,
        SMALL_NBYTES,
        SMALL_NBYTES,
    ]
    for n, size in enumerate(sizes):
        r.offer(torch.full((size,), n, dtype=torch.uint8))
    r.finish()

    start = r.session.arena.address
    for _, host, _ in r.device.fetches:
        first, last = host.data_ptr() - start, host.data_ptr() - start + host.numel() - 1
        assert first // step == last // step
    assert r.session.flush(10)
    assert peer.data_of("x") == [bytes([n]) * size for n, size in enumerate(sizes)]


# -- pieces -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 KiB, issued while less than 128 KiB are under way."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 1 << 16)
    monkeypatch.setattr(transfers, "AHEAD_NBYTES", 1 << 17)


@pytest.mark.usefixtures("small_pieces")
def test_a_large_capture_goes_in_pieces_of_which_few_are_under_way(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    tensor = torch.randint(256, (5 * (1 << 16) + 300,), dtype=torch.uint8)
    r.offer(tensor)

    r.stager.advance()
    r.stager.advance()
    assert r.device.sizes == [1 << 16] * 2
    r.device.run(0)
    r.stager.advance()
    assert r.device.sizes == [1 << 16] * 3
    r.finish()

    assert r.device.sizes == [1 << 16] * 5 + [300]
    assert [len(after) for _, _, after in r.device.fetches] == [1, 0, 0, 0, 0, 0]
    assert r.session.flush(10)
    assert peer.data_of("x") == [tensor.numpy().tobytes()]


@pytest.mark.usefixtures("small_pieces")
def test_a_capture_is_ready_when_its_last_piece_is_there(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB), by_hand=True)
    r.offer(torch.zeros((1 << 16) + 300, dtype=torch.uint8))
    r.stager.advance()
    r.device.run(1)
    assert r.stager.advance() == 0
    r.device.run(0)
    assert r.stager.advance() == 1
    assert not r.stager.pending


@pytest.mark.usefixtures("small_pieces")
def test_unpinned_copies_wait_for_their_tensor_and_leave_room_for_others(peer: Peer, rig: MakeRig) -> None:
    r = rig(FakeDevice(nbytes=MIB, pinned=False, ready=False), by_hand=True)
    tensor = torch.randint(256, (3 * (1 << 16),), dtype=torch.uint8)
    r.offer(tensor)

    r.stager.advance()
    assert r.device.fetches == []  # it would wait for all that the training thread has queued
    r.device.issued[0].happened = True
    for count in (1, 2, 3):
        r.stager.advance()
        assert len(r.device.fetches) == count
    assert r.stager.advance() == 1
    assert r.session.flush(10)
    assert peer.data_of("x") == [tensor.numpy().tobytes()]


@pytest.mark.usefixtures("small_pieces")
def test_acknowledgements_and_pings_go_on_between_unpinned_copies(peer: Peer, rig: MakeRig) -> None:
    """The device holds every copy up until a PING went out and an acknowledgement came in since the last one."""
    seen: list[tuple[int, int]] = []

    class Slow(FakeDevice):
        def fetch(self, *args: object) -> None:
            seen.append((peer.pings, r.session.snapshot().committed))
            super().fetch(*args)  # type: ignore[arg-type]

        def query(self, event: object) -> bool:
            if seen and peer.pings == seen[-1][0]:
                return False  # not yet: nothing is fetched, but the thread must go on
            return super().query(event)  # type: ignore[arg-type]

    r = rig(Slow(nbytes=MIB, pinned=False), ping_s=0.1)
    r.session.offer(torch.zeros(4), KEY, r.session.context.moment())
    r.offer(torch.zeros(4 << 16, dtype=torch.uint8))
    assert r.session.flush(20)
    assert len(seen) == 4
    assert r.session.snapshot().committed == 2


# -- pace ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_issued_only_as_fast_as_allowed(peer: Peer, rig: MakeRig) -> None:
    clock = Clock()
    r = rig(FakeDevice(nbytes=MIB), by_hand=True, pace=Pace((1 << 16) / 1e9, clock))  # a piece per second
    r.offer(torch.zeros(3 << 16, dtype=torch.uint8))
    counts = []
    for _ in range(6):
        r.stager.advance()
        r.device.run_all()
        counts.append(len(r.device.fetches))
        clock.now += 0.5
    assert counts == [1, 1, 2, 2, 3, 3]
    assert r.session.flush(10)


def test_no_limit_is_no_limit() -> None:
    clock = Clock()
    pace = Pace(None, clock)
    for _ in range(1000):
        assert not pace.left_s
        pace.spend(1 << 40)


@pytest.mark.parametrize("tick_s", rows([0.0007, 0.001, 0.009, 0.05], [0.009]))
def test_the_rate_is_kept_whatever_the_size_of_copies_and_the_looks(tick_s: float) -> None:
    """10 GB/s over ten seconds, looked at every `tick_s`: never above, and reached where looks are frequent."""
    for nbytes in (64 << 10, 1 << 20, 32 << 20):
        clock = Clock()
        pace = Pace(10.0, clock)
        sent, start = 0, clock.now
        while clock.now < start + 10:
            while not pace.left_s:
                pace.spend(nbytes)
                sent += nbytes
            assert sent <= 10e9 * (clock.now - start + 0.0101) + nbytes
            clock.now += tick_s
        if tick_s < 0.01 or nbytes > 10e9 * tick_s:
            assert sent >= 0.99 * 10e9 * 10


def test_time_without_copies_is_not_saved_up() -> None:
    clock = Clock()
    pace = Pace(1.0, clock)
    clock.now += 3600
    sent = 0
    while not pace.left_s:
        pace.spend(1 << 20)
        sent += 1 << 20
    assert sent <= 1e9 * 0.01 + (1 << 20)


def test_a_limit_may_be_lifted_by_another_thread_at_any_moment() -> None:
    paces: list[Pace] = []

    def clock() -> float:
        for pace in paces:
            pace.lift()
        return 100.0

    pace = Pace(1.0, clock)
    paces.append(pace)
    pace.spend(1 << 20)
    assert not pace.left_s


def test_a_closing_session_is_not_held_back(peer: Peer, make_session: Callable[..., Session]) -> None:
    session = make_session(max_d2h_gbps=0.001)
    pace = session.devices._pace
    pace.spend(1 << 40)
    assert pace.left_s
    session.close()
    assert not pace.left_s
