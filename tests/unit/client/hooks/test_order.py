"""Taps stand next to the product: what other hooks make of its input and output is what they make of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capd_client.protocol.kinds import LINEAR
from capd_client.watching.watch import watch
from tests.kit.client.sink import MemorySink


def convert(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 2,)


def reduce(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


def algebra_holds(sink: MemorySink, model: nn.Sequential, iteration: int = 0) -> None:
    one = {name: sink.one("0", name, (iteration, 0, 0)) for name in LINEAR.tensors}
    assert torch.equal(one["output"], F.linear(one["input"], one["weight"]))
    assert torch.equal(one["grad_input"], one["grad_output"] @ one["weight"])
    assert torch.equal(one["grad_weight"], one["grad_output"].T @ one["input"])


def test_hooks_put_on_before_the_watch_work_outside_of_the_taps(sink: MemorySink) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    model[0].register_forward_pre_hook(convert)
    model[0].register_forward_hook(reduce)
    watch(model, tensors=LINEAR.tensors)

    x = torch.randn(5, 4, requires_grad=True)
    model(x).sum().backward()

    assert torch.equal(sink.one("0", "input"), x * 2)
    algebra_holds(sink, model)


def test_hooks_put_on_behind_the_watch_work_outside_of_the_taps_too(sink: MemorySink) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    watch(model, tensors=LINEAR.tensors)
    model[0].register_forward_pre_hook(convert)
    model[0].register_forward_hook(reduce)

    x = torch.randn(5, 4, requires_grad=True)
    model(x).sum().backward()

    assert torch.equal(sink.one("0", "input"), x * 2)
    algebra_holds(sink, model)


def test_hooks_put_on_amid_training_work_outside_of_the_taps_too(sink: MemorySink) -> None:
    """Who takes ZeRO-3's hooks off to generate puts them back behind everybody's."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, steps="1", tensors=LINEAR.tensors)
    model(torch.randn(5, 4, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].register_forward_pre_hook(convert)
    model[0].register_forward_hook(reduce)

    x = torch.randn(5, 4, requires_grad=True)
    model(x).sum().backward()

    assert torch.equal(sink.one("0", "input", (1, 0, 0)), x * 2)
    algebra_holds(sink, model, 1)


def test_a_forward_of_its_own_that_a_linear_was_given_works_outside_of_the_tap(sink: MemorySink) -> None:
    """torchtitan redistributes there what goes in and comes out."""
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    plain: Any = model[0].forward
    model[0].forward = lambda x: plain(x * 2) * 3  # type: ignore[method-assign]
    watch(model, tensors=LINEAR.tensors)

    x = torch.randn(5, 4, requires_grad=True)
    model(x).sum().backward()

    assert torch.equal(sink.one("0", "input"), x * 2)
    algebra_holds(sink, model)
