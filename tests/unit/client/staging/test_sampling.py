"""What mode `sample:1/N` keeps: whole calls by their moment alone, the others counted and never touched."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from capd_client.inflight.counters import REASON_INDEX
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.session.session import Session
from tests.kit.client.peer import Peer

KEY = Key(quant_type="q", rank=0, tensor_name="x")
OTHER = Key(quant_type="q", rank=0, tensor_name="y")


def settled(session: Session) -> dict[str, int]:
    """The drops, after everything else is committed and the sum was found exact."""
    assert session.flush(10)
    now = session.snapshot()
    assert now.in_flight == 0
    assert now.offered == now.committed + sum(now.dropped.values())
    return now.dropped


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_every_nth_call_is_kept_and_both_tensors_of_it(
    every: int, peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True, mode=f"sample:1/{every}")
    moments = [Moment(*at) for at in product(range(5), range(3), range(2))]
    for moment in moments:
        for key in (KEY, OTHER):
            session.offer(torch.full((4,), float(moment.iteration)), key, moment)

    kept = [m for m in moments if (m.iteration + m.micro_batch + m.call) % every == 0]
    left_out = 2 * (len(moments) - len(kept))
    assert settled(session) == ({"sampled": left_out} if left_out else {})
    found = [(record.key.tensor_name, record.descriptor.moment) for record in peer.records]
    assert found == [(key.tensor_name, moment) for moment in kept for key in (KEY, OTHER)]
    assert kept[0] == Moment(0, 0, 0)


def test_of_n_micro_batches_in_turn_each_is_kept_once_in_n_iterations(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True, mode="sample:1/4")
    for iteration, micro_batch in product(range(8), range(4)):
        session.offer(torch.zeros(4), KEY, Moment(iteration, micro_batch))

    assert settled(session) == {"sampled": 24}
    turns = [record.descriptor.moment.micro_batch for record in peer.records]
    assert turns == [0, 3, 2, 1] * 2


def test_what_is_left_out_is_in_the_ledger_by_key_with_the_bytes_it_would_have_taken(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True, mode="sample:1/3")
    for iteration in range(1, 6):
        session.offer(torch.zeros(10), KEY, Moment(iteration))
        session.offer(torch.zeros(10), OTHER, Moment(iteration), cast_to=torch.bfloat16)
    session.close(10)

    rows = {
        (key.tensor_name, dtype, row.reason): (row.count, row.nbytes, row.first_iteration, row.last_iteration)
        for (key, dtype, _), row in peer.drops.items()
    }
    sampled = REASON_INDEX[DropReason.SAMPLED]
    assert rows == {("x", "float32", sampled): (4, 160, 1, 5), ("y", "bfloat16", sampled): (4, 80, 1, 5)}


def test_what_is_left_out_is_not_waited_for_and_takes_no_room(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    class AsyncCollectiveTensor(torch.Tensor):
        def wait(self) -> torch.Tensor:
            raise AssertionError("waited for")

    session = make_session(strict=True, mode="sample:1/2")
    session.offer(torch.zeros(4).as_subclass(AsyncCollectiveTensor), KEY, Moment(1))
    session.offer(torch.zeros(1 << 22), KEY, Moment(1))  # larger than the arena
    free = session.queue.slots.free_nbytes

    assert session.snapshot().dropped == {"sampled": 2}
    assert free == session.queue.slots.capacity


def test_a_key_that_cannot_be_kept_is_said_to_be_invalid_at_every_call(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(mode="sample:1/2")
    for iteration in range(4):
        session.offer(torch.zeros(4), Key(quant_type="q", rank=-1, tensor_name="x"), Moment(iteration))

    assert settled(session) == {"invalid_key": 4}


def test_after_the_end_what_would_be_left_out_counts_under_the_reason_of_the_end(
    peer: Peer, make_session: Callable[..., Session]
) -> None:
    session = make_session(strict=True, mode="sample:1/2")
    session.queue.close(DropReason.REJECTED)
    session.offer(torch.zeros(4), KEY, Moment(1))

    assert session.snapshot().dropped == {"rejected": 1}
