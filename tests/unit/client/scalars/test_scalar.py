"""`scalar()`: every number arrives bit for bit at the step it belongs to, in any mode, and nothing waits or raises."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import capd_client
from capd_client.errors import ConfigError
from capd_client.protocol.counter_page import DropReason
from capd_client.protocol.scalars import is_scalar, scalar_key
from capd_client.scalars import recording
from capd_client.scalars.recording import record
from capd_client.session.session import Session
from tests.kit.client.device import FakeDevice, Rig
from tests.kit.client.peer import Peer
from tests.kit.tiers import rows


def values(peer: Peer, name: str) -> list[float]:
    return [struct.unpack("<d", data)[0] for data in peer.data_of(name)]


def moments(peer: Peer, name: str) -> list[tuple[int, int, int]]:
    found = [one.descriptor.moment for one in peer.records if one.key.tensor_name == name]
    return [(moment.iteration, moment.micro_batch, moment.call) for moment in found]


NUMBERS: list[tuple[Any, float]] = [
    (0.1, 0.1),
    (3, 3.0),
    (True, 1.0),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.int64(-7), -7.0),
    (torch.tensor(0.1, dtype=torch.bfloat16), 0.10009765625),
    (torch.tensor([[2.5]], requires_grad=True), 2.5),
    (torch.tensor(1 << 40), float(1 << 40)),
    (math.inf, math.inf),
    (-math.inf, -math.inf),
    (-0.0, -0.0),
    (5e-324, 5e-324),
]


def test_every_number_arrives_as_the_float64_that_it_is(on: Peer) -> None:
    for number, _ in NUMBERS:
        capd_client.scalar("x", number)
    capd_client.scalar("nan", math.nan)

    assert capd_client.flush(10)
    assert on.data_of("x") == [struct.pack("<d", expected) for _, expected in NUMBERS]
    assert math.isnan(values(on, "nan")[0])
    sent = on.records[0]
    assert (sent.key, sent.dtype) == (scalar_key("x", 0), "float64")
    assert is_scalar(sent.key)
    assert (sent.descriptor.shape, sent.descriptor.payload) == ((), True)


@pytest.mark.parametrize(
    "number",
    rows(
        [
            1j, "3", None, torch.tensor(1j), 10**400, np.complex64(3 + 4j), np.str_("3"), np.bytes_(b"3"),
            np.timedelta64(3, "s"), torch.empty((), device="meta"),
        ],
        ["3", 10**400, np.complex64(3 + 4j)],
    ),
    ids=repr,
)  # fmt: skip
def test_what_is_no_real_number_is_a_counted_drop(on: Peer, number: Any) -> None:
    capd_client.scalar("x", number)

    assert capd_client.flush(10)
    assert capd_client.counters()["dropped"] == {DropReason.UNSUPPORTED.value: 1}
    assert not on.records


@pytest.mark.parametrize(
    "number",
    [[1.0], torch.zeros(2), np.array("7"), np.array([1.0, 2.0])],
    ids=["list", "tensor", "text", "array"],
)
def test_what_has_no_one_number_is_a_counted_drop(on: Peer, number: Any) -> None:
    capd_client.scalar("x", number)

    assert capd_client.counters()["dropped"] == {DropReason.UNSUPPORTED.value: 1}


def test_swapped_arguments_are_not_read(on: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a tensor on a GPU would wait for the GPU."""

    def read(*_: Any, **__: Any) -> str:
        raise AssertionError("the tensor was read")

    monkeypatch.setattr(torch.Tensor, "__repr__", read)
    monkeypatch.setattr(torch.Tensor, "__format__", read)
    capd_client.scalar(torch.ones(3), "loss")  # type: ignore[arg-type]
    capd_client.scalar(torch.ones(3), 1.0)  # type: ignore[arg-type]

    assert capd_client.counters()["dropped"] == {
        DropReason.UNSUPPORTED.value: 1,
        DropReason.INVALID_KEY.value: 1,
    }


@pytest.mark.parametrize("name", [7, "", None, "n" * 5000])
def test_a_bad_name_is_a_counted_drop(on: Peer, name: Any) -> None:
    capd_client.scalar(name, 1.0)

    assert capd_client.flush(10)
    assert capd_client.counters()["dropped"] == {DropReason.INVALID_KEY.value: 1}


def test_a_bad_name_raises_under_strict(on: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPD_STRICT", "1")

    with pytest.raises(ConfigError, match="name"):
        capd_client.scalar("", 1.0)
    with pytest.raises(ConfigError, match="iteration"):
        capd_client.scalar("x", 1.0, iteration=-1)


def test_without_an_endpoint_nothing_happens(fresh: pytest.MonkeyPatch) -> None:
    capd_client.scalar("loss", 1.0)
    capd_client.scalar("loss", "anything")

    assert capd_client.counters()["offered"] == 0


@pytest.mark.parametrize("after_step", [False, True], ids=["before the step", "after the step"])
@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
def test_a_loss_belongs_to_its_step_wherever_the_loop_records_it(
    on: Peer, watched: bool, after_step: bool
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if watched:
        capd_client.watch(model)
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        if not after_step:
            capd_client.scalar("loss", step)
        optimizer.step()
        if after_step:
            capd_client.scalar("loss", step)

    assert capd_client.flush(10)
    assert moments(on, "loss") == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]


def test_a_watch_that_ends_leaves_the_iterations_to_the_scalars(on: Peer) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = capd_client.watch(model)
    for step in range(4):
        if step == 2:
            handle.remove()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        capd_client.scalar("loss", step)

    assert capd_client.flush(10)
    assert moments(on, "loss") == [(step, 0, 0) for step in range(4)]


def test_scalars_of_another_thread_begin_no_iteration(on: Peer) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def monitor() -> None:
        for temperature in (60, 61, 62):
            capd_client.scalar("temperature", temperature)

    for step in range(2):
        optimizer.step()
        thread = threading.Thread(target=monitor)
        thread.start()
        thread.join()
        capd_client.scalar("loss", step)

    assert capd_client.flush(10)
    assert moments(on, "loss") == [(0, 0, 0), (1, 0, 0)]
    assert moments(on, "temperature") == [(0, 0, call) for call in range(6)]


def test_names_without_end_are_counted_drops_and_the_first_ones_keep_their_places(
    on: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_keys", {})
    monkeypatch.setattr(recording, "_MAX_NAMES", 3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(2):
        for name in "abcde":
            capd_client.scalar(name, 1.0)
        optimizer.step()

    assert capd_client.flush(10)
    assert [moments(on, name) for name in "abc"] == [[(0, 0, 0), (1, 0, 0)]] * 3
    assert capd_client.counters()["dropped"] == {DropReason.INVALID_KEY.value: 4}


def test_a_scalar_names_its_own_step_and_counts_its_calls(on: Peer) -> None:
    capd_client.scalar("loss", 1.0, iteration=7, micro_batch=2)
    capd_client.scalar("loss", 2.0, iteration=7, micro_batch=2)
    capd_client.scalar("other", 3.0, iteration=7, micro_batch=2)

    assert capd_client.flush(10)
    assert moments(on, "loss") == [(7, 2, 0), (7, 2, 1)]
    assert moments(on, "other") == [(7, 2, 0)]


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "stats"},
        {"mode": "sample:1/7"},
        {"max_mb_per_step": 1e-6},
        {"policy": "stats"},
        {"policy": "thin"},
    ],
    ids=str,
)
def test_no_mode_and_no_budget_leaves_a_scalar_out(
    peer: Peer, make_session: Callable[..., Session], settings: dict[str, Any]
) -> None:
    session = make_session(strict=True, **settings)
    for step in range(5):
        record(session, "loss", step / 3, step)

    assert session.flush(10)
    assert values(peer, "loss") == [step / 3 for step in range(5)]
    assert not session.snapshot().dropped


def test_without_room_a_scalar_is_dropped_at_once_though_captures_would_wait(
    socket_path: str, make_session: Callable[..., Session]
) -> None:
    session = make_session(max_block_ms=60_000.0, policy="block", arena_bytes=1 << 16)
    began = time.monotonic()
    for step in range(3000):
        record(session, "loss", step, 0)

    dropped = session.snapshot().dropped
    assert time.monotonic() - began < 50
    assert set(dropped) == {DropReason.ARENA_FULL.value}
    assert dropped[DropReason.ARENA_FULL.value] > 1000


def test_threads_lose_nothing(on: Peer) -> None:
    def run(name: str) -> None:
        for step in range(500):
            capd_client.scalar(name, step)

    threads = [threading.Thread(target=run, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert capd_client.flush(30)
    assert {name: values(on, name) for name in "abcd"} == {name: [*map(float, range(500))] for name in "abcd"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_device_tensor_is_taken_by_a_snapshot_that_nothing_waits_for(
    peer: Peer, rig: Callable[..., Rig], dtype: torch.dtype
) -> None:
    made = rig()
    loss = torch.tensor([[0.1]], dtype=dtype)
    key = scalar_key("loss", 0)
    made.border.offer_scalar(loss.reshape(()), key, made.session.context.moment())
    loss.zero_()
    made.started(1)
    assert not peer.records

    made.device.run(0)
    assert made.session.flush(10)
    assert values(peer, "loss") == [float(torch.tensor(0.1, dtype=dtype))]


@pytest.mark.parametrize("stream", [0, 1], ids=["same stream", "another stream"])
@pytest.mark.parametrize("ordered", [False, True], ids=["ring", "ordered ring"])
def test_a_device_tensor_without_room_is_dropped_at_once_though_captures_would_wait(
    rig: Callable[..., Rig], ordered: bool, stream: int
) -> None:
    made = rig(FakeDevice(nbytes=4096), by_hand=True, ordered=ordered, policy="block", max_block_ms=60_000.0)
    made.offer(torch.ones(1024))
    # What the ring holds belongs to stream 0.
    made.device.current = stream

    began = time.monotonic()
    made.border.offer_scalar(torch.tensor(1.0), scalar_key("loss", 0), made.session.context.moment())
    assert time.monotonic() - began < 30
    assert made.session.snapshot().dropped == {DropReason.RING_FULL.value: 1}
    assert not made.device.held_back


@pytest.mark.parametrize("policy", ["thin", "stats"])
def test_a_scalar_without_room_leaves_what_tensors_are_kept_as_it_was(
    rig: Callable[..., Rig], policy: str
) -> None:
    made = rig(FakeDevice(nbytes=4096), by_hand=True, policy=policy)
    session, moment = made.session, made.session.context.moment()
    thinning = session.queue.policy.thinning
    assert thinning is None or thinning.keeps(moment)
    made.offer(torch.ones(1024))
    made.border.offer_scalar(torch.tensor(1.0), scalar_key("loss", 0), moment)

    assert session.snapshot().dropped == {DropReason.RING_FULL.value: 1}
    assert thinning is None or thinning.one_of == 1


def test_a_scalar_under_a_dispatch_mode_is_not_seen_by_it(on: Peer) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False), torch.device("meta"):
        capd_client.scalar("loss", torch.tensor(2.0, device="cpu"))

    assert capd_client.flush(10)
    assert values(on, "loss") == [2.0]


def test_inside_a_function_transform_there_is_no_value(on: Peer) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        capd_client.scalar("x", x)
        return x * 2

    assert torch.vmap(double)(torch.ones(3)).tolist() == [2, 2, 2]
    assert capd_client.flush(10)
    assert capd_client.counters()["dropped"] == {DropReason.UNSUPPORTED.value: 1}
