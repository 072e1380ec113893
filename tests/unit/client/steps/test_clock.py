"""The wall clock may jump: nothing that waits, or gives up waiting, goes by it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from capd_client.protocol.key import Key, Moment
from capd_client.session.session import Session
from tests.kit.client.peer import Peer, wait_until

KEY = Key(quant_type="q", rank=0, tensor_name="x")


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_ends_no_connection_and_no_wait(
    jump_s: float, peer: Peer, make_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, real_ns, jump = time.time, time.time_ns, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(jump[0] * 1e9))
    session = make_session(ping_s=0.5)  # a busy machine may keep the peer from answering for some time
    for n in range(200):
        jump[0] = jump_s * (n % 3 - 1)
        session.offer(torch.full((4,), float(n)), KEY, Moment(iteration=n))
    assert session.flush(20)
    pings = peer.pings
    jump[0] = jump_s
    wait_until(lambda: peer.pings >= pings + 3)
    jump[0] = 0.0

    assert [record.descriptor.moment.iteration for record in peer.records] == list(range(200))
    assert len(peer.hellos) == 1, "the connection stands"
    assert session.snapshot().dropped == {}
    began = time.monotonic()
    peer.ack = False
    session.offer(torch.ones(4), KEY, Moment())
    jump[0] = jump_s
    assert not session.flush(0.2)
    assert 0.2 <= time.monotonic() - began < 10
