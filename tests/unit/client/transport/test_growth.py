"""When the arena grows, and when it is to shrink; the rest is in tests/integration/ranks/test_arena_growth.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from capd_client.arena.arena import STEP_NBYTES
from capd_client.protocol.key import Key
from capd_client.session.session import Session
from capd_client.transport import growth
from capd_client.transport.growth import FIRST_NBYTES, Growth
from tests.kit.client.peer import Peer, wait_until

MIB = 1 << 20
KEY = Key(quant_type="fp32", rank=0, tensor_name="x")


class Used:
    """A session at rest whose growth is looked at by hand."""

    def __init__(self, session: Session) -> None:
        session.transport.growth = None
        self.session, self.arena, self.queue = session, session.arena, session.queue
        self.now = 0.0
        self.growth = Growth(
            session.arena, session.queue, session.devices, "", session._hello, clock=lambda: self.now
        )

    def take(self, nbytes: int) -> Callable[[], None]:
        """Have a slot taken; what gives it back."""
        with self.queue.lock:
            slot = self.queue.slots.take(nbytes)
            assert slot is not None

        def give() -> None:
            with self.queue.lock:
                self.queue.slots.give(slot)

        return give


@pytest.fixture
def used(make_session: Callable[..., Session]) -> Used:
    return Used(make_session(arena_bytes=512 * MIB))


def test_it_grows_ahead_of_the_highest_use_and_within_its_bound(used: Used) -> None:
    assert used.arena.target - used.arena.start == FIRST_NBYTES
    highest = 0
    for nbytes in (1, 10, 17, 40, 3, 90, 30):
        give = used.take(nbytes * MIB)
        highest = max(highest, nbytes * MIB)
        assert not used.growth.look()
        assert (
            2 * nbytes * MIB
            <= used.arena.target - used.arena.start
            <= max(2 * highest + STEP_NBYTES, FIRST_NBYTES)
        )
        give()
    used.take(400 * MIB)
    used.growth.look()
    assert used.arena.target == used.arena.nbytes  # and no more
    wait_until(lambda: used.arena.prefaulted(0))


def test_it_shrinks_after_a_whole_quiet_and_not_for_little(used: Used) -> None:
    give = used.take(150 * MIB)
    used.growth.look()
    give()
    wait_until(lambda: used.arena.prefaulted(0))

    used.now += growth.QUIET_S  # the highest use is part of this window
    assert not used.growth.look()
    give = used.take(140 * MIB)
    used.now += growth.QUIET_S / 2
    used.growth.look()
    give()
    used.now += growth.QUIET_S / 2
    assert not used.growth.look()  # 280 of 320 MiB are needed
    used.now += growth.QUIET_S / 2
    assert not used.growth.look()
    used.now += growth.QUIET_S / 2
    assert used.growth.look()


def test_nothing_in_flight_is_taken_from_under_its_writers(
    peer: Peer, make_session: Callable[..., Session], socket_path: str
) -> None:
    """Captures that are not answered yet, slots that were given up, and an absent daemon: each keeps the memory."""
    session = make_session(arena_bytes=64 * MIB)
    session.offer(torch.ones(4), KEY, session.context.moment())
    assert session.flush(20)
    session.transport.growth = None
    grow = Growth(session.arena, session.queue, session.devices, socket_path, session._hello)
    fd = session.arena.fd
    wait_until(lambda: session.arena.prefaulted(0))

    peer.ack = False
    session.offer(torch.ones(4), KEY, session.context.moment())
    assert grow.shrink(99) is None
    peer.ack = True
    session.transport._renew.set()
    assert session.flush(20)
    session.queue.copying = True
    assert grow.shrink(99) is None
    session.queue.copying = False
    grow._endpoint = socket_path + "-nobody"
    assert grow.shrink(99) is None
    assert session.arena.fd == fd
    session.offer(torch.ones(4), KEY, session.context.moment())
    assert session.flush(20)
