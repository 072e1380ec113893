"""Static taps: a buffer that a graph fills, captured after each replay; here the replay is a function on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import capd_client
from capd_client.protocol.key import Key
from tests.kit.client.peer import Peer


def values(peer: Peer) -> list[list[float]]:
    return [np.frombuffer(data, np.float32).tolist() for data in peer.data_of("y")]


def test_each_replay_gives_one_record_of_its_own_values_and_moment(on: Peer) -> None:
    x = torch.zeros(2, requires_grad=True)
    tap = capd_client.static_tap(x, tensor_name="y", layer=3)

    for step in range(3):
        y = x + float(step)
        tap.copy(y)
        with torch.no_grad():
            y.zero_()  # the buffer is not the tensor
        tap.after_replay(iteration=step)
    y.sum().backward()

    assert capd_client.flush(10)
    assert values(on) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert on.records[0].key == Key(quant_type="fp32", rank=0, tensor_name="y", layer=3)
    assert [record.descriptor.moment.iteration for record in on.records] == [0, 1, 2]
    assert x.grad is not None
    assert not on.records[0].descriptor.requires_grad


def test_a_replay_that_ran_no_copy_repeats_what_is_in_the_buffer(on: Peer) -> None:
    tap = capd_client.static_tap([2], tensor_name="y", dtype=torch.float32, device="cpu")

    tap.after_replay()  # nothing is in it yet
    tap.copy(torch.ones(2))
    tap.after_replay()
    tap.after_replay()

    assert capd_client.flush(10)
    assert values(on) == [[1.0, 1.0]] * 2


def test_a_strided_tensor_and_one_in_inference_mode(on: Peer) -> None:
    with torch.inference_mode():
        tap = capd_client.static_tap(torch.empty(2, 2), tensor_name="y")
        tap.copy(torch.arange(4.0).reshape(2, 2).t())
        tap.after_replay()
    tap.copy(torch.ones(2, 2))
    tap.after_replay()

    assert capd_client.flush(10)
    assert values(on) == [[0.0, 2.0, 1.0, 3.0], [1.0] * 4]


@pytest.mark.parametrize("given", [torch.ones(3), torch.ones(2, dtype=torch.float64), [1.0, 2.0], None])
def test_what_does_not_fit_is_counted_and_never_raised(on: Peer, given: Any) -> None:
    tap = capd_client.static_tap(torch.ones(2), tensor_name="y")

    tap.copy(given)
    tap.after_replay()

    assert capd_client.counters()["dropped"] == {"unsupported": 1}


def test_a_tap_that_cannot_be_made_is_counted_and_does_nothing(
    on: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tap in (
        capd_client.static_tap("shape", tensor_name="y"),  # type: ignore[arg-type]
        capd_client.static_tap([-1], tensor_name="y"),
    ):
        tap.copy(torch.ones(2))
        tap.after_replay()
    assert capd_client.counters()["dropped"] == {"unsupported": 2}

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    capd_client.static_tap([2], tensor_name="y").after_replay()
    assert capd_client.counters()["dropped"]["stream_capture"] == 1


def test_off_it_holds_nothing(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("CAPD_ENDPOINT", "off")

    tap = capd_client.static_tap(torch.ones(2), tensor_name="y")
    tap.copy(torch.ones(2))
    tap.after_replay()

    assert tap._buffer is None
    with pytest.raises(TypeError, match="layr"):  # found off as well as on, and not in the middle of training
        capd_client.static_tap(torch.ones(2), tensor_name="y", layr=3)
    with pytest.raises(TypeError, match="iteratoin"):
        tap.after_replay(iteratoin=3)  # type: ignore[call-arg]


def test_after_close_it_does_nothing(on: Peer) -> None:
    tap = capd_client.static_tap(torch.ones(2), tensor_name="y")
    capd_client.close()

    tap.copy(torch.ones(2))
    tap.after_replay()

    assert on.records == []
