"""Activation checkpointing: a recompute is never a capture, and its gradients belong to the first pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from capd_client.protocol.control import Steer
from capd_client.protocol.kinds import LINEAR
from capd_client.protocol.selection import Selection
from capd_client.watching import watch as watch_calls
from capd_client.watching.attach import WatchHandle
from capd_client.watching.watch import watch
from tests.kit.client.models import Blocks, Repeated, non_reentrant, reentrant
from tests.kit.client.sink import MemorySink

KINDS = pytest.mark.parametrize("wrap", [reentrant, non_reentrant])
Wrap = Callable[..., Any]
Found = dict[tuple[str, str, tuple[int, int, int]], torch.Tensor]
Capture = Callable[[nn.Module, list[torch.Tensor], list[int]], Found]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """Run a model's forwards, then its backwards in `order`; what was captured, by series and moment."""

    def run(model: nn.Module, inputs: list[torch.Tensor], order: list[int]) -> Found:
        sink = MemorySink()
        monkeypatch.setattr(watch_calls, "session", lambda: sink)
        handle = watch_calls.watch(model, tensors=LINEAR.tensors)
        losses = [model(x).square().sum() for x in inputs]
        for i in order:
            losses[i].backward()
        handle.remove()
        found = {(c.key.module, c.key.tensor_name, c.at): c.value for c in sink.captured}
        assert sink.errors == []
        assert len(found) == len(sink.captured), "something was captured twice"
        assert not any(c.moment.recompute for c in sink.captured)
        return found

    return run


def assert_same(got: Found, expected: Found) -> None:
    assert got.keys() == expected.keys()
    for series, value in expected.items():
        assert torch.equal(got[series], value), series


@KINDS
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_checkpointed_blocks_give_what_plain_ones_give(
    capture: Capture, wrap: Wrap, order: list[int]
) -> None:
    plain, checkpointed = Blocks(), Blocks(wrap)
    checkpointed.load_state_dict(plain.state_dict())
    inputs = [torch.randn(4, 6) for _ in order]

    expected = capture(plain, inputs, order)
    got = capture(checkpointed, inputs, order)

    assert_same(got, expected)
    assert sum(name == "grad_output" for _, name, _ in got) == 5 * len(order)


@KINDS
@pytest.mark.parametrize("scope", ["wrap", "wrap_all"])
def test_calls_keep_their_numbers_through_a_recompute(capture: Capture, wrap: Wrap, scope: str) -> None:
    # One segment per call runs its recomputes in reverse order, one segment around all in forward order.
    plain, checkpointed = Repeated(), Repeated(**{scope: wrap})
    checkpointed.load_state_dict(plain.state_dict())
    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]

    expected = capture(plain, inputs, [0, 1])
    got = capture(checkpointed, inputs, [0, 1])

    # Nested backwards give dW one call at a time, so only the plain model has their sum in one record.
    strip = {k: v for k, v in got.items() if k[1] != "grad_weight"}
    assert_same(strip, {k: v for k, v in expected.items() if k[1] != "grad_weight"})
    for micro_batch in range(2):
        parts = [v for k, v in got.items() if k[1] == "grad_weight" and k[2][1] == micro_batch]
        torch.testing.assert_close(sum(parts), expected["fc", "grad_weight", (0, micro_batch, 0)])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # checkpoint under no_grad
def test_nested_reentrant_segments_find_their_moments(capture: Capture) -> None:
    plain, nested = Repeated(), Repeated(wrap=reentrant, wrap_all=reentrant)
    nested.load_state_dict(plain.state_dict())
    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]

    expected = capture(plain, inputs, [1, 0])
    got = capture(nested, inputs, [1, 0])

    assert_same(
        {k: v for k, v in got.items() if k[1] != "grad_weight"},
        {k: v for k, v in expected.items() if k[1] != "grad_weight"},
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # checkpoint under no_grad
@KINDS
def test_a_pass_without_gradients_before_the_real_one_does_not_confuse_it(
    sink: MemorySink, wrap: Wrap
) -> None:
    model = Blocks(wrap)
    watch(model)

    with torch.no_grad():
        model(torch.randn(4, 6))
    model(torch.randn(4, 6)).sum().backward()

    for name in ("input", "grad_output"):
        assert [c.at for c in sink.captured if c.key.tensor_name == name] == [(0, 0, 0)] * 5


def test_recompute_in_an_uncaptured_step_captures_nothing(sink: MemorySink) -> None:
    model = Blocks(reentrant)
    watch(model, steps="1")

    model(torch.randn(4, 6)).sum().backward()

    assert sink.captured == []


@KINDS
def test_a_recomputed_root_is_no_further_micro_batch(sink: MemorySink, wrap: Wrap) -> None:
    model = Blocks()
    watch(model)

    for _ in range(2):
        wrap(model, torch.randn(4, 6, requires_grad=True)).sum().backward()

    for tensor_name in ("input", "grad_output"):
        assert [c.at for c in sink.of("inlet", tensor_name)] == [(0, 0, 0), (0, 1, 0)]


def kept(handle: WatchHandle, sink: MemorySink) -> None:
    pass


def removed(handle: WatchHandle, sink: MemorySink) -> None:
    handle.remove()


def steered(handle: WatchHandle, sink: MemorySink) -> None:
    sink.steering.receive(Steer(id=1, from_iteration=0, selection=Selection(tensors=("input",))))
    sink.steering.begin(0)


@pytest.mark.parametrize("before_the_backward", [kept, removed, steered])
def test_a_segment_that_saves_every_operation_finds_its_own_again(
    sink: MemorySink, before_the_backward: Callable[[WatchHandle, MemorySink], None]
) -> None:
    """Selective checkpointing gives the second pass what the first one computed, counted by operation."""

    def body(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(layers[0](x)).view(4, 6) * 2
        return torch.tanh(layers[1](hidden.sin().view(4, 6)))

    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    gradients = []
    for watched in (False, True):
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        x = torch.randn(4, 6, requires_grad=True)
        handle = watch(layers, tensors=LINEAR.tensors) if watched else None
        loss = checkpoint(body, layers, x.sin(), use_reentrant=False, context_fn=contexts).sum()
        if handle is not None:
            before_the_backward(handle, sink)
        loss.backward()
        gradients.append([x.grad, *(p.grad for p in layers.parameters())])

    assert all(map(torch.equal, *gradients))
    forward = ("input", "weight", "output")
    assert sink.names() == dict.fromkeys(LINEAR.tensors if before_the_backward is kept else forward, 2)
