"""What `watch` captures while `capd ctl` narrows, widens, stops and starts it; nothing is left behind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from capd_client.config.settings import ClientConfig
from capd_client.hooks.sites import Site
from capd_client.hooks.tap import Tap
from capd_client.protocol.kinds import LINEAR
from capd_client.watching.watch import watch
from capd_client.watching.watched import is_tapped
from tests.kit.client.models import MLP, Blocks
from tests.kit.client.sink import MemorySink
from tests.kit.client.steering import OPERANDS, of, steer, taken, train


def test_modules_are_narrowed_and_widened_and_go_back(sink: MemorySink) -> None:
    model = Blocks()
    watch(model, select="layers.*")
    own = ("layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2")
    train(model)
    assert taken(sink) == of(0, own, OPERANDS)

    steer(sink, modules=("inlet", "layers.1.*"))
    train(model)
    assert taken(sink) == of(1, ("inlet", "layers.1.0", "layers.1.2"), OPERANDS)
    assert sink.steering.answer is not None
    assert sink.steering.answer.modules == 3

    steer(sink, modules=("*.2",), tensors=("output",))
    train(model)
    assert taken(sink) == of(2, ("layers.0.2", "layers.1.2"), ("output",))

    steer(sink)
    train(model)
    assert taken(sink) == of(3, own, OPERANDS)
    assert not is_tapped(Site(model.inlet, LINEAR))  # another watch may have it


def test_other_tensors_are_captured_with_their_hooks_on_the_weight(sink: MemorySink) -> None:
    model = MLP()
    watch(model)
    for number in range(2):
        steer(sink, tensors=("grad_weight", "grad_input"))
        train(model)
        modules = ("fc1", "fc2")
        wanted = of(2 * number, modules, ("grad_weight",)) + of(2 * number, ("fc2",), ("grad_input",))
        assert taken(sink) == wanted
        assert model.fc1.weight._backward_hooks
        steer(sink)
        train(model)
        assert taken(sink) == of(2 * number + 1, modules, OPERANDS)
        assert not model.fc1.weight._backward_hooks


def test_ranges_stand_in_for_those_of_the_script(sink: MemorySink) -> None:
    sink.config = ClientConfig(steps="0", micro_batches="0")
    model = MLP()
    watch(model, tensors=["input"])
    steer(sink, steps="1-", micro_batches="all")
    train(model, steps=2, micro_batches=2)
    assert taken(sink) == Counter({(1, "fc1", "input"): 2, (1, "fc2", "input"): 2})

    steer(sink, steps="all", ranks="1-")
    train(model)
    assert taken(sink) == Counter()
    assert sink.steering.answer is not None
    assert sink.steering.answer.modules == 0

    steer(sink, steps="3")
    train(model, micro_batches=2)
    assert taken(sink) == of(3, ("fc1", "fc2"), ("input",))


def test_a_stop_in_mid_step_leaves_the_step_whole_and_costs_nothing_then(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MLP()
    watch(model)
    loss = model(torch.randn(2, 6)).sum()
    steer(sink, capturing=False)
    loss.backward()
    model(torch.randn(2, 6)).sum().backward()
    assert taken(sink) == of(0, ("fc1", "fc2"), OPERANDS) + of(
        0, ("fc1", "fc2"), ("input", "output", "grad_output")
    )

    sink.context.optimizer_stepped()
    model(torch.randn(2, 6))
    assert not sink.capturing

    def reached(*_: object) -> None:
        raise AssertionError("the tap was asked although capture is stopped")

    monkeypatch.setattr(Tap, "begin", reached)
    model(torch.randn(2, 6)).sum().backward()
    assert taken(sink) == Counter()
    monkeypatch.undo()

    steer(sink, at=2)
    train(model)
    train(model)
    assert sink.capturing
    assert taken(sink) == of(2, ("fc1", "fc2"), OPERANDS)


def test_two_watches_of_one_model_share_its_modules_whatever_is_selected(sink: MemorySink) -> None:
    model = Blocks()
    first = watch(model, select="layers.0.*", tensors=["input"])
    watch(model, select="layers.1.*", tensors=["output"])
    steer(sink, modules=("*",))
    train(model)
    assert taken(sink) == of(0, ("inlet", "layers.0.0", "layers.0.2"), ("input",)) + of(
        0, ("layers.1.0", "layers.1.2"), ("output",)
    )

    first.remove()
    assert len(model.inlet._forward_hooks) == len(model.inlet._forward_pre_hooks) == 1  # the other watch's
    steer(sink, modules=("*",))
    train(model)
    assert {module for _, module, _ in taken(sink)} == {module for module, _ in _linears(model)}


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_a_model_watched_under_an_order_begins_with_it(sink: MemorySink) -> None:
    steer(sink, capturing=False)
    sink.context.begin_if_dirty()
    model = MLP()
    watch(model)
    train(model)
    assert taken(sink) == Counter()


def test_training_computes_the_same_bits_whatever_is_ordered(sink: MemorySink) -> None:
    torch.manual_seed(3)
    plain = Blocks()
    steered = Blocks()
    steered.load_state_dict(plain.state_dict())
    watch(steered, select="layers.*")
    orders: list[dict[str, Any]] = [{"modules": ("*",)}, {"tensors": ("grad_input", "grad_weight")}, {}]
    for number, selection in enumerate(orders):
        steer(sink, **selection)
        for model in (plain, steered):
            torch.manual_seed(number)
            train(model, micro_batches=2)

    assert all(map(torch.equal, plain.state_dict().values(), steered.state_dict().values()))
