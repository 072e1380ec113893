"""Policy thin: whole calls by an exact rule, whatever the buffers do, and the accounts stay exact."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capd_client.arena.allocator import SlotAllocator
from capd_client.inflight.capture import Capture
from capd_client.inflight.counters import Counters
from capd_client.inflight.policies import Drop
from capd_client.inflight.queue import Queue
from capd_client.inflight.thinning import CALM, MAX_FACTOR, REMEMBERED, Thinning
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.key import Key, Moment
from capd_client.protocol.messages import Descriptor
from capd_client.session.session import Session
from capd_client.staging import describe
from capd_client.staging.sampling import Sampling
from capd_client.transport.client_thread import State
from tests.kit.client.peer import Peer, wait_until

PAGE = 4096
KEYS = [Key(quant_type="q", rank=0, tensor_name=name) for name in ("input", "output", "grad_output")]


def begin(thinning: Thinning, first: int, count: int) -> list[int]:
    """Iterations that are kept of `count` ones from `first` on."""
    return [i for i in range(first, first + count) if thinning.keeps(Moment(i))]


def test_without_a_refusal_everything_is_kept() -> None:
    assert begin(Thinning(), 0, 1000) == list(range(1000))


def test_a_refusal_doubles_the_factor_once_from_the_next_call_on() -> None:
    thinning = Thinning()
    assert begin(thinning, 0, 6) == list(range(6))
    for _ in range(5):
        thinning.refused(Moment(5))
    assert (thinning.factor, thinning.one_of) == (1, 2)
    assert thinning.keeps(Moment(5))
    assert begin(thinning, 6, 5) == [6, 8, 10]
    thinning.refused(Moment(10))
    assert thinning.one_of == 4
    assert begin(thinning, 11, 10) == [12, 16, 20]


def test_a_refusal_of_a_call_that_began_at_an_earlier_factor_doubles_nothing_more() -> None:
    thinning = Thinning()
    begin(thinning, 0, 4)  # forwards of one pipeline, whose backwards come later
    thinning.refused(Moment(0))
    begin(thinning, 4, 1)
    for i in range(4):
        thinning.refused(Moment(i))
    assert begin(thinning, 5, 4) == [6, 8]
    assert thinning.factor == 2


def test_what_belongs_to_a_call_shares_its_fate_when_the_factor_has_changed() -> None:
    thinning = Thinning()
    begin(thinning, 0, 4)
    thinning.refused(Moment(3))
    begin(thinning, 4, 4)

    assert [i for i in range(8) if thinning.keeps(Moment(i))] == [0, 1, 2, 3, 4, 6]


def test_micro_batches_and_calls_count_like_iterations() -> None:
    thinning = Thinning()
    thinning.keeps(Moment(0))
    thinning.refused(Moment(0))
    moments = [Moment(1 + i, m, c) for i in range(3) for m in range(2) for c in range(2)]

    assert [m for m in moments if thinning.keeps(m)] == [
        m for m in moments if (m.iteration + m.micro_batch + m.call) % 2 == 0
    ]


def test_behind_a_sampling_it_thins_what_the_sampling_keeps() -> None:
    thinning = Thinning(every=3)
    thinning.keeps(Moment(0))
    thinning.refused(Moment(0))
    assert thinning.one_of == 6
    assert begin(thinning, 3, 20) == [6, 12, 18]


def test_the_factor_halves_after_so_many_kept_calls_without_a_refusal() -> None:
    thinning = Thinning()
    thinning.keeps(Moment(0))
    thinning.refused(Moment(0))
    kept = begin(thinning, 1, 2 * CALM)
    assert kept == list(range(2, 2 * CALM + 1, 2))
    assert len(kept) == CALM
    assert begin(thinning, 2 * CALM + 1, 3) == [2 * CALM + 1, 2 * CALM + 2, 2 * CALM + 3]
    assert thinning.factor == 1


def test_a_refusal_begins_the_count_of_quiet_calls_anew() -> None:
    thinning = Thinning()
    begin(thinning, 0, 2)
    thinning.refused(Moment(1))
    begin(thinning, 2, 2 * (CALM - 1))
    thinning.refused(Moment(0))  # of an earlier factor: doubles nothing
    begin(thinning, 2 * CALM, 2 * (CALM - 1))
    assert thinning.factor == 2
    begin(thinning, 4 * CALM - 2, 4)
    assert thinning.factor == 1


def test_the_factor_has_an_end_and_a_new_connection_begins_anew() -> None:
    thinning = Thinning()
    for i in range(0, 4 * MAX_FACTOR * MAX_FACTOR, MAX_FACTOR):
        assert thinning.keeps(Moment(i))
        thinning.refused(Moment(i))
        if thinning.factor == MAX_FACTOR:
            break
    assert thinning.factor == thinning.one_of == MAX_FACTOR
    thinning.restart()
    assert thinning.one_of == 1
    assert begin(thinning, 10**9, 5) == list(range(10**9, 10**9 + 5))


def test_what_is_remembered_is_bounded() -> None:
    thinning = Thinning()
    begin(thinning, 0, 3 * REMEMBERED)
    assert len(thinning._factors) == REMEMBERED


class Offer(NamedTuple):
    """Captures of one call, `pages` each; ring: the device's ring has no room for them."""

    at: tuple[int, int, int]
    pages: int
    ring: bool


class Quiet(NamedTuple):
    """Small captures of consecutive iterations, acknowledged at once."""

    iterations: int


MOMENTS = st.tuples(st.integers(0, 40), st.integers(0, 2), st.integers(0, 1))
OFFERS = st.builds(Offer, MOMENTS, st.integers(0, 3), st.booleans())
EVENTS = st.one_of(
    OFFERS, OFFERS, st.builds(Quiet, st.integers(1, 3 * CALM)), st.sampled_from(["ack", "reconnect"])
)


class Rig:
    """A queue of eight pages, the sampling before it, and the law of thinning written down from its history."""

    def __init__(self, every: int) -> None:
        self.thinning = Thinning(every)
        slots = SlotAllocator(PAGE, 8 * PAGE)
        self.queue = Queue(slots, Counters(), Drop(self.thinning), step_nbytes=40 * PAGE)
        self.sampling = Sampling(self.queue, every, self.thinning)
        self.every = every
        self.ring_full = False
        self.outcomes: dict[tuple[int, int, int], set[str]] = {}
        self.begun: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self.forgotten: set[tuple[int, int, int]] = set()
        self.history: list[
            tuple[str, tuple[int, int, int], int]
        ] = []  # what happened, to which call, its factor

    def _stage(self, tensor: torch.Tensor, key: Key, moment: Moment) -> None:
        left_out = self.sampling.left_out(describe.Offer(tensor, key, moment))
        if left_out is not None:
            self.queue.refuse(left_out)
            return
        definition = self.queue.definitions.make(key, tensor.dtype, None)
        descriptor = Descriptor(0, 0, tensor.nbytes, definition.id, tuple(tensor.shape), moment)
        capture = self.queue.admit(definition, descriptor)
        if isinstance(capture, Capture) and self.ring_full:
            self.queue.abort(capture, DropReason.RING_FULL)
        elif isinstance(capture, Capture):
            self.queue.ready(capture)

    def offer(self, at: tuple[int, int, int], pages: int) -> None:
        """One call's captures, and what became of each."""
        for key in KEYS:
            before = self.queue.snapshot().dropped
            self._stage(torch.zeros(pages * PAGE // 4), key, Moment(*at))
            after = self.queue.snapshot().dropped
            [what] = [r for r in after if after[r] != before.get(r, 0)] or ["taken"]
            self.outcomes.setdefault(at, set()).add(what)
            self._expect(at, what)
            self.check()

    def _expect(self, at: tuple[int, int, int], what: str) -> None:
        """The law, from the history alone."""
        if sum(at) % self.every:
            assert what == "sampled"
            return
        begun = self.begun
        if at not in begun:
            if len(begun) == REMEMBERED:
                self.forgotten.add(begun.popitem(last=False)[0])
            begun[at] = self._factor_of_the_next()
            kept = sum(at) % (self.every * begun[at]) == 0
            self.history += [("begin", at, begun[at])] + ([("kept", at, begun[at])] if kept else [])
        assert (what == "thinned") == (sum(at) % (self.every * begun[at]) != 0)
        if what in ("arena_full", "ring_full", "step_budget"):
            self.history.append(("refused", at, begun[at]))

    def _factor_of_the_next(self) -> int:
        restarts = [i for i, (event, _, _) in enumerate(self.history) if event == "restart"]
        recent = self.history[restarts[-1] + 1 :] if restarts else self.history
        begins = [i for i, (event, _, _) in enumerate(recent) if event == "begin"]
        last = begins[-1] if begins else 0
        present = recent[last][2] if begins else 1
        if any(event == "refused" and factor == present for event, _, factor in recent[last:]):
            return min(2 * present, MAX_FACTOR)
        same = next(
            (
                i + 1
                for i in range(len(recent) - 1, -1, -1)
                if recent[i][0] == "begin" and recent[i][2] != present
            ),
            0,
        )
        refused = [i for i, (event, _, _) in enumerate(recent) if event == "refused"]
        quiet = recent[max(same, refused[-1] + 1 if refused else 0) :]
        calm = sum(event == "kept" and factor == present for event, _, factor in quiet)
        return max(1, present // 2) if present > 1 and calm >= CALM else present

    def acknowledge(self) -> None:
        while batch := self.queue.next_batch(64):
            self.queue.acknowledged([(c.descriptor.sequence, c.descriptor.sequence) for c in batch])

    def check(self) -> None:
        now = self.queue.snapshot()
        assert now.offered == now.committed + now.in_flight + sum(now.dropped.values())
        assert self.thinning.factor in {2**n for n in range(11)}


@given(st.sampled_from([1, 1, 2, 3]), st.lists(EVENTS, max_size=60))
def test_whatever_happens_calls_are_whole_the_law_holds_and_the_sum_is_exact(
    every: int, events: list[Any]
) -> None:
    rig = Rig(every)
    iteration = 1000
    for event in events:
        if isinstance(event, Offer):
            rig.ring_full = event.ring
            rig.offer(event.at, event.pages)
            rig.ring_full = False
        elif isinstance(event, Quiet):
            for _ in range(event.iterations):
                rig.offer((iteration, 0, 0), 0)
                rig.acknowledge()
                iteration += 1
        elif event == "ack":
            rig.acknowledge()
        else:
            rig.queue.reconnected()
            rig.history.append(("restart", (0, 0, 0), 0))
        rig.check()
    rig.acknowledge()
    rig.check()
    assert not rig.queue.busy
    assert rig.queue.slots.free_nbytes == rig.queue.slots.capacity
    torn = {at for at, found in rig.outcomes.items() if "thinned" in found and len(found) > 1}
    assert torn <= rig.forgotten


@pytest.fixture
def connected(peer: Peer, make_session: Callable[..., Session]) -> Callable[..., Session]:
    """Sessions whose connection stands: its beginning ends a thinning."""

    def make(**settings: Any) -> Session:
        session = make_session(strict=True, policy="thin", **settings)
        wait_until(lambda: session.transport.state is State.RUNNING)
        return session

    return make


def test_a_daemon_that_answers_nothing_costs_whole_calls_and_no_more(
    peer: Peer, connected: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    peer.ack = False
    session = connected(arena_bytes=(1 + 8) * PAGE)
    tensor = torch.zeros(PAGE // 4)
    for iteration in range(70):
        for key in KEYS:
            session.offer(tensor, key, Moment(iteration))

    # Eight slots: calls 0 and 1 whole, two thirds of call 2. From call 3 on the factor is 2; it doubles with each call
    # that is kept and finds no room: 4, 8, 16, 32, 64.
    refused = 1 + 3 * 5
    thinned = 3 * (70 - 3 - 5)
    now = session.snapshot()
    assert (now.offered, now.in_flight) == (210, 8)
    assert now.dropped == {"arena_full": refused, "thinned": thinned}
    [warning] = [r.getMessage() for r in caplog.records if "thin" in r.getMessage()]
    assert "policy thin keeps one of 2 calls from the next one on. Raise CAPD_ARENA_BYTES" in warning
    session.close(0.0)
    assert session.snapshot().dropped == {"arena_full": refused, "thinned": thinned, "not_connected": 8}


def test_thinning_goes_by_the_budget_of_a_step_too(connected: Callable[..., Session]) -> None:
    session = connected(max_mb_per_step=2 * PAGE / 1e6)
    for micro_batch in range(8):
        session.offer(torch.zeros(PAGE // 4), KEYS[0], Moment(0, micro_batch))
    assert session.flush(10)

    # 0 and 1 fill the budget; 2 is refused, so 3 is thinned; 4 is refused, so 5, 6 and 7 are.
    assert session.snapshot().dropped == {"step_budget": 2, "thinned": 4}


def test_a_new_connection_begins_at_factor_one(peer: Peer, connected: Callable[..., Session]) -> None:
    session = connected()
    thinning = session.queue.policy.thinning
    assert thinning is not None
    with session.queue.lock:
        thinning.keeps(Moment())
        thinning.refused(Moment())
    assert thinning.one_of == 2
    session.transport._renew.set()
    wait_until(lambda: len(peer.hellos) == 2 and session.transport.state is State.RUNNING)
    assert thinning.one_of == 1


def test_other_policies_have_no_thinning(peer: Peer, make_session: Callable[..., Session]) -> None:
    assert [make_session(policy=policy).queue.policy.thinning for policy in ("drop", "block")] == [
        None,
        None,
    ]
