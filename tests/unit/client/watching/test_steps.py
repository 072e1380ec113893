"""Which steps, micro-batches and passes are captured, and that everything else leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from capd_client.config.settings import ClientConfig
from capd_client.hooks.tap import Tap
from capd_client.watching.watch import watch
from tests.kit.client.models import MLP, Repeated
from tests.kit.client.sink import MemorySink


def moments(sink: MemorySink, tensor_name: str = "input") -> list[tuple[int, int, int]]:
    return [c.at for c in sink.captured if c.key.tensor_name == tensor_name]


def train(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int, micro_batches: int = 1
) -> None:
    for _ in range(steps):
        for _ in range(micro_batches):
            model(torch.randn(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_only_selected_steps_are_captured(sink: MemorySink) -> None:
    model = Repeated(1)
    watch(model, steps="1,3-")

    train(model, [sgd(model)], steps=5, micro_batches=2)

    assert moments(sink) == [(s, m, 0) for s in (1, 3, 4) for m in (0, 1)]


def test_steps_come_from_the_settings_and_default_to_the_first(sink: MemorySink) -> None:
    sink.config = ClientConfig()
    model = Repeated(1)
    watch(model)

    train(model, [sgd(model)], steps=3)

    assert moments(sink) == [(0, 0, 0)]


def test_settings_restrict_micro_batches_and_ranks(sink: MemorySink) -> None:
    sink.config = ClientConfig(steps="all", micro_batches="1", ranks="0")
    model, other = Repeated(1), Repeated(1)
    watch(model)
    train(model, [sgd(model)], steps=2, micro_batches=3)
    assert moments(sink) == [(0, 1, 0), (1, 1, 0)]

    sink.config = ClientConfig(steps="all", ranks="1-")
    sink.captured.clear()
    watch(other)
    train(other, [sgd(other)], steps=2)
    assert moments(sink) == []


def test_an_uncaptured_step_asks_nothing_of_the_tap(
    sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Repeated(3)
    watch(model, steps="1")
    model(torch.randn(2, 4))

    def reached(*_: object) -> None:
        raise AssertionError("the tap was asked in a step known not to be captured")

    monkeypatch.setattr(Tap, "begin", reached)
    monkeypatch.setattr(Tap, "end", reached)
    model(torch.randn(2, 4)).sum().backward()

    assert sink.errors == []


def test_the_micro_batch_has_begun_when_the_models_own_pre_hooks_run(sink: MemorySink) -> None:
    model = Repeated(1)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda *_: seen.append(sink.context.micro_batch))
    watch(model)

    model(torch.randn(2, 4))
    model(torch.randn(2, 4))

    assert seen == [0, 1]


def test_several_optimizers_end_one_iteration(sink: MemorySink) -> None:
    model = Repeated(1)
    watch(model)

    train(model, [sgd(model), sgd(model)], steps=3, micro_batches=2)

    assert moments(sink) == [(s, m, 0) for s in range(3) for m in range(2)]


def test_a_manual_iteration_wins(sink: MemorySink) -> None:
    model = Repeated(1)
    optimizer = sgd(model)
    watch(model, steps="100-:100")

    for iteration in (99, 100, 150, 200):
        sink.context.set_moment(iteration=iteration)
        train(model, [optimizer], steps=1, micro_batches=2)

    assert moments(sink) == [(100, 0, 0), (100, 1, 0), (200, 0, 0), (200, 1, 0)]


def test_eval_passes_are_neither_captured_nor_counted(sink: MemorySink) -> None:
    model = Repeated(1)
    optimizer = sgd(model)
    watch(model)

    for _ in range(2):
        train(model, [optimizer], steps=1)
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 4))
            model.fc(torch.randn(2, 4))
        model.train()

    assert moments(sink) == [(0, 0, 0), (1, 0, 0)]


def test_a_frozen_part_in_eval_mode_is_left_out(sink: MemorySink) -> None:
    model = MLP()
    model.fc1.eval()
    watch(model)

    model(torch.randn(2, 6)).sum().backward()

    assert {c.key.module for c in sink.captured} == {"fc2"}


def test_modules_called_outside_the_root_start_the_iteration_too(sink: MemorySink) -> None:
    model = MLP()
    optimizer = sgd(model)
    watch(model)

    for _ in range(2):
        model.fc1(torch.randn(2, 6))  # before the root's own forward, in the same iteration
        model(torch.randn(2, 6)).sum().backward()
        optimizer.step()

    assert [c.at for c in sink.of("fc1", "input")] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]


def test_roots_inside_or_beside_each_other_count_micro_batches_once(sink: MemorySink) -> None:
    outer = nn.Sequential(Repeated(1), nn.Identity())
    beside = Repeated(1)
    optimizer = sgd(outer)
    watch(outer, name="outer")
    watch(outer[0], name="inner")  # its modules are watched already, so this attaches nothing
    watch(beside, name="beside")

    for _ in range(2):
        for _ in range(2):
            beside(outer(torch.randn(2, 4))).sum().backward()
        optimizer.step()

    expected = [(s, m, 0) for s in range(2) for m in range(2)]
    assert [c.at for c in sink.of("outer.0.fc", "input")] == expected
    assert [c.at for c in sink.of("beside.fc", "input")] == expected


def test_roots_that_take_turns_count_the_micro_batches_of_their_own_iterations(sink: MemorySink) -> None:
    models = {"first": Repeated(1), "second": Repeated(1)}
    for name, model in models.items():
        watch(model, name=name)

    for name in ("first", "second", "first"):
        train(models[name], [sgd(models[name])], steps=1, micro_batches=2)

    assert [c.at for c in sink.of("first.fc", "input")] == [(0, 0, 0), (0, 1, 0), (2, 0, 0), (2, 1, 0)]
    assert [c.at for c in sink.of("second.fc", "input")] == [(1, 0, 0), (1, 1, 0)]


def test_a_root_inside_another_watched_apart_counts_nothing_of_its_own(sink: MemorySink) -> None:
    outer = nn.Sequential(nn.Linear(4, 4), Repeated(1))
    watch(outer[1], name="inner")
    watch(outer, name="outer", select="outer.0")

    for _ in range(2):
        outer(torch.randn(2, 4)).sum().backward()

    assert [c.at for c in sink.of("inner.fc", "input")] == [(0, 0, 0), (0, 1, 0)]
    assert [c.at for c in sink.of("outer.0", "input")] == [(0, 0, 0), (0, 1, 0)]


def test_a_forward_that_failed_half_way_leaves_no_moment_behind(sink: MemorySink) -> None:
    model = MLP()
    optimizer = sgd(model)
    watch(model, steps="0", tensors=["output"])
    weight, model.fc2.weight = model.fc2.weight, nn.Parameter(torch.randn(3, 5))

    with pytest.raises(RuntimeError):
        model(torch.randn(2, 6))  # fc2's product itself raises, after its pre-hook
    model.fc2.weight = weight
    optimizer.step()
    model(torch.randn(2, 6)).sum().backward()

    assert [(c.key.module, c.at) for c in sink.captured] == [("fc1", (0, 0, 0))]


def test_losses_gradients_and_random_numbers_are_bit_identical_with_and_without(sink: MemorySink) -> None:
    def run(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = MLP(dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        handle = watch(
            model, tensors=("input", "weight", "output", "grad_output", "grad_input", "grad_weight")
        )
        if not watched:
            handle.remove()
        seen = []
        for _ in range(4):
            for _ in range(2):
                loss = model(torch.randn(3, 5, 6)).square().mean()
                loss.backward()
                seen.append(loss.detach())
            seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        return [*seen, *(p.detach() for p in model.parameters()), torch.get_rng_state()]

    with_capture, without = run(True), run(False)

    assert sink.captured
    assert len(with_capture) == len(without)
    assert all(torch.equal(a, b) for a, b in zip(with_capture, without, strict=True))


def test_a_micro_batch_that_runs_again_in_its_iteration_goes_on_counting_calls(sink: MemorySink) -> None:
    model = MLP()
    watch(model, steps="all")

    for micro_batch in (0, 1, 0, 1):
        sink.context.set_moment(micro_batch=micro_batch)
        model(torch.randn(2, 6))

    assert [c.at for c in sink.of("fc1", "input")] == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
