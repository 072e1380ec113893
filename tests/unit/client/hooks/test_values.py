"""What the taps capture is what the matrix products computed: algebra between the captured tensors."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capd_client.protocol.kinds import LINEAR
from capd_client.watching.watch import watch
from tests.kit.client.models import MLP, Projections, Repeated
from tests.kit.client.sink import MemorySink

ALL = LINEAR.tensors


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def assert_algebra(
    sink: MemorySink, name: str, module: nn.Linear, at: tuple[int, int, int] = (0, 0, 0), *, calls: int = 1
) -> None:
    """Y = XWᵀ + b, dX = dYW, dW = dYᵀX."""
    x, y, dy = (sink.one(name, t, at) for t in ("input", "output", "grad_output"))
    w = sink.one(name, "weight", (at[0], 0, 0))
    assert close(y, F.linear(x, w, None if module.bias is None else module.bias.detach()))
    for dx in [c.value for c in sink.of(name, "grad_input") if c.at == at]:
        assert close(dx, dy @ w)
    for dw in [c.value for c in sink.of(name, "grad_weight") if c.at == at and calls == 1]:
        assert close(dw, dy.flatten(0, -2).T @ x.flatten(0, -2))


def test_default_capture_is_the_operands_of_each_product_weight_once_per_step(sink: MemorySink) -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch(model)

    for _ in range(2):
        for _ in range(3):
            model(torch.randn(2, 5, 6)).square().sum().backward()
        optimizer.step()

    steps, micro_batches, linears = 2, 3, 2
    per_micro_batch = steps * micro_batches * linears
    assert sink.names() == Counter(
        input=per_micro_batch, output=per_micro_batch, grad_output=per_micro_batch, weight=steps * linears
    )
    for step in range(steps):
        for micro_batch in range(micro_batches):
            assert_algebra(sink, "fc1", model.fc1, (step, micro_batch, 0))
            assert_algebra(sink, "fc2", model.fc2, (step, micro_batch, 0))


def test_a_weight_is_offered_until_a_call_of_its_step_is_kept(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "keeps", lambda moment: moment.micro_batch == 1)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch(model)

    for _ in range(2):
        for _ in range(3):
            model(torch.randn(2, 6)).sum().backward()
        optimizer.step()

    offered = [captured.at for captured in sink.of("fc1", "weight")]
    assert offered == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_gradients_of_input_and_weight_come_on_request(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=ALL)

    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()

    assert sink.names()["grad_weight"] == 4
    assert not sink.of("fc1", "grad_input")  # the batch itself needs no gradient
    assert len(sink.of("fc2", "grad_input")) == 2
    for micro_batch in range(2):
        assert_algebra(sink, "fc1", model.fc1, (0, micro_batch, 0))
        assert_algebra(sink, "fc2", model.fc2, (0, micro_batch, 0))
    assert model.fc2.weight.grad is not None
    assert close(model.fc2.weight.grad, sum(c.value for c in sink.of("fc2", "grad_weight")))  # type: ignore[arg-type]


def test_only_grad_weight_needs_no_other_tensor(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=["grad_weight"])

    model(torch.randn(4, 6)).sum().backward()

    assert sink.names() == Counter(grad_weight=2)
    assert model.fc1.weight.grad is not None
    assert torch.equal(sink.one("fc1", "grad_weight"), model.fc1.weight.grad)


def test_each_consumer_of_a_shared_input_gets_its_own_grad_input(sink: MemorySink) -> None:
    model = Projections()
    watch(model, tensors=ALL)

    model(torch.randn(3, 4)).square().sum().backward()

    for name in ("q", "k", "v"):
        assert_algebra(sink, name, getattr(model, name))
    total = sum(sink.one(name, "grad_input") for name in ("q", "k", "v"))
    assert close(sink.one("inlet", "grad_output"), total)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [(32,), (4, 8), (2, 4, 4)])
def test_in_place_change_after_the_product_reaches_neither_output_nor_grad_output(
    sink: MemorySink, batch: tuple[int, ...]
) -> None:
    model = MLP()  # with a batch of several axes fc1's output is a view, which in-place changes cut off
    watch(model)

    model(torch.randn(*batch, 6)).sum().backward()

    y, dy = sink.one("fc1", "output"), sink.one("fc1", "grad_output")
    assert (y < 0).any()
    expected = (torch.ones(*batch, 3) @ model.fc2.weight.detach()) * (y > 0)
    assert close(dy, expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_gradients_carry_the_micro_batch_of_their_forward_in_any_order(
    sink: MemorySink, order: tuple[int, ...]
) -> None:
    model = MLP()
    watch(model, tensors=ALL)

    losses = [model(torch.randn(4, 6) * (i + 1)).square().sum() for i in range(3)]
    for i in order:
        losses[i].backward()

    for micro_batch in range(3):
        assert_algebra(sink, "fc1", model.fc1, (0, micro_batch, 0))
        assert_algebra(sink, "fc2", model.fc2, (0, micro_batch, 0))


def test_calls_of_one_module_in_a_micro_batch_are_numbered(sink: MemorySink) -> None:
    model = Repeated(times=3)
    watch(model, tensors=ALL)

    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()

    w = sink.one("fc", "weight")
    for micro_batch in range(2):
        parts = []
        for call in range(3):
            assert_algebra(sink, "fc", model.fc, (0, micro_batch, call), calls=3)
            at = (0, micro_batch, call)
            parts.append(sink.one("fc", "grad_output", at).T @ sink.one("fc", "input", at))
        assert close(sink.one("fc", "grad_weight", (0, micro_batch, 0)), sum(parts))  # type: ignore[arg-type]
    assert close(w, model.fc.weight.detach())


def test_keyword_input_is_captured_and_aliased_like_a_positional_one(sink: MemorySink) -> None:
    model = nn.Linear(3, 2, bias=False)
    watch(model, tensors=ALL)

    x = torch.randn(4, 3, requires_grad=True)
    model(input=x).square().sum().backward()

    assert x.grad is not None
    assert close(sink.one("Linear", "grad_input"), x.grad)
    assert_algebra(sink, "Linear", model)


def test_gradients_of_a_backward_in_another_thread_belong_to_their_forward(sink: MemorySink) -> None:
    model = MLP()
    watch(model)
    losses = [model(torch.randn(2, 5, 6)).square().sum() for _ in range(2)]

    for loss in reversed(losses):  # as autograd's device threads do it: hooks run where the backward runs
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert sink.names()["grad_output"] == 4
    for micro_batch in range(2):
        assert_algebra(sink, "fc1", model.fc1, (0, micro_batch, 0))
        assert_algebra(sink, "fc2", model.fc2, (0, micro_batch, 0))


def test_autocast_operands_are_recorded_as_the_product_used_them(sink: MemorySink) -> None:
    model = MLP()
    watch(model)
    x = torch.randn(4, 6)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().sum()
    loss.backward()

    for tensor_name in ("input", "weight"):
        (capture,) = sink.of("fc1", tensor_name)
        assert capture.value.dtype is torch.bfloat16
        assert capture.attributes == {"cast_from": "float32", "class": "Linear", "emulation": "none"}
        assert capture.key.quant_type == "bf16"
    assert torch.equal(sink.one("fc1", "input"), x.bfloat16())
    (second,) = sink.of("fc2", "input")  # already bf16: the product used it as it was
    assert second.attributes == {"class": "Linear", "emulation": "none"}
    y = F.linear(sink.one("fc1", "input"), sink.one("fc1", "weight"), model.fc1.bias.detach().bfloat16())
    assert torch.equal(sink.one("fc1", "output"), y)
    assert sink.one("fc1", "grad_output").dtype is torch.bfloat16


def test_autocast_leaves_float64_alone(sink: MemorySink) -> None:
    model = nn.Linear(3, 2, bias=False).double()
    watch(model)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 3, dtype=torch.float64))

    assert {c.value.dtype for c in sink.captured} == {torch.float64}


def test_key_and_moment_say_what_and_when(sink: MemorySink) -> None:
    model = MLP()
    watch(model, tensors=ALL)

    model(torch.randn(4, 6)).sum().backward()

    placement = {
        c.key.tensor_name: (c.key.operation, c.key.phase, c.key.layer_type, c.key.component)
        for c in sink.captured
    }
    assert placement == {
        "input": ("forward", "pre", "linear", "linear"),
        "weight": ("forward", "pre", "linear", "linear"),
        "output": ("forward", "post", "linear", "linear"),
        "grad_output": ("backward", "pre", "linear", "linear"),
        "grad_input": ("backward", "post", "linear", "linear"),
        "grad_weight": ("backward", "post", "linear", "linear"),
    }
    times = [c.moment.time_ns for c in sink.captured if c.key.tensor_name != "grad_weight"]
    assert min(times) > 0
    dy, y = sink.of("fc1", "grad_output")[0], sink.of("fc1", "output")[0]
    assert dy.moment.time_ns > y.moment.time_ns
    assert y.requires_grad


def test_a_backward_that_skips_the_weight_leaves_no_moment_for_a_later_one(sink: MemorySink) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, tensors=["grad_weight"], steps="0")
    x = torch.randn(4, 3, requires_grad=True)

    torch.autograd.grad(model(x).sum(), x)
    optimizer.step()
    model(x).sum().backward()

    assert sink.captured == []


def test_a_weight_that_a_wrapper_replaces_keeps_giving_its_gradient(sink: MemorySink) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, tensors=["grad_weight"])

    for _ in range(2):
        model.weight = nn.Parameter(model.weight.detach().clone())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()

    assert [c.at for c in sink.captured] == [(0, 0, 0), (1, 0, 0)]


def test_parameters_can_be_swapped_as_in_an_unwatched_model(sink: MemorySink) -> None:
    """It is how torch converts parameters on request, and it refuses tensors that something refers to weakly."""
    model = nn.Linear(3, 2)
    watch(model, tensors=ALL)
    model(torch.ones(1, 3)).sum().backward()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)

    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()

    assert [c.value.dtype for c in sink.of("Linear", "output")] == [torch.float32, torch.float64]


def test_a_model_on_the_meta_device_runs_as_ever(sink: MemorySink) -> None:
    """It has no autocast; the session refuses what it gives."""
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    watch(model)

    model(torch.empty(1, 3, device="meta")).sum().backward()

    assert sink.errors == []


def test_keys_follow_the_rank_of_the_process_group(sink: MemorySink, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 2)
    watch(model, tensors=["input"])
    model(torch.randn(4, 3))

    monkeypatch.setattr(sink.context, "bind", lambda: 5)
    model(torch.randn(4, 3))

    assert [c.key.rank for c in sink.captured] == [0, 5]
