"""How capd's clock follows frameworks that cannot run here: stand-ins with the attributes and calls of the real ones.

Those that can run are in tests/integration/counters/test_step_counting.py.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from capd_client.integrations.counters import patches
from capd_client.process.log import RateLimitedLog
from capd_client.steps import clock
from capd_client.watching.attach import WatchHandle
from capd_client.watching.watch import watch
from tests.kit.client.sink import MemorySink

At = tuple[int, int, int]


def traced(method: Any) -> Any:
    """What torchtitan puts around both of its methods."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


class Titan:
    """torchtitan.trainer.Trainer: its steps begin with 1, and a step has several micro-batches."""

    def __init__(self, model: nn.Module, pipelined: bool = False) -> None:
        self.step = 0
        self.model = model
        self.parallel_dims = SimpleNamespace(pp_enabled=pipelined)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @traced
    def forward_backward_step(self) -> None:
        self.model(torch.randn(2, 4)).sum().backward()

    @traced
    def train_step(self) -> None:
        for _ in range(3):
            self.forward_backward_step()
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.train_step()


class Engine(nn.Module):
    """deepspeed.runtime.engine.DeepSpeedEngine: every micro-batch ends with a step() of its own."""

    def __init__(self, model: nn.Module, accumulated: int = 2, managed: bool = True) -> None:
        super().__init__()
        self.module = model
        self.global_steps = self.micro_steps = 0
        self.managed = managed
        self._is_gradient_accumulation_boundary = None
        self._accumulated = accumulated
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def gradient_accumulation_steps(self) -> int:
        return self._accumulated

    def managed_gradient_accumulation(self) -> bool:
        return self.managed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def step(self) -> None:
        self.micro_steps += 1
        if not self.managed or self.micro_steps % self._accumulated == 0:
            self._optimizer.step()
            self.global_steps += 1


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(patches, "_notices", RateLimitedLog())
    monkeypatch.setattr(clock, "_notices", RateLimitedLog())
    yield
    assert not clock._counters
    assert not patches._adopted


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type]:
    """Puts a new class like `like` where a framework has its own."""

    def put(module: str, name: str, like: type) -> type:
        made = type(name, (like,), {**vars(like), "__module__": module})
        imported = ModuleType(module)
        setattr(imported, name, made)
        monkeypatch.setitem(sys.modules, module, imported)
        return made

    return put


def moments(sink: MemorySink) -> list[At]:
    return [c.at for c in sink.captured if c.key.tensor_name == "input"]


def model_watched() -> tuple[nn.Module, WatchHandle]:
    model = nn.Sequential(nn.Linear(4, 4))
    return model, watch(model, steps="all")


@pytest.mark.parametrize("pipelined", [False, True])
def test_torchtitan(sink: MemorySink, put: Callable[..., type], pipelined: bool) -> None:
    trainer_class = put("torchtitan.trainer", "Trainer", Titan)
    model, _ = model_watched()
    trainer = trainer_class(model, pipelined)
    trainer.step = 1000  # resumed

    trainer.train(2)

    assert moments(sink) == [(i, m, 0) for i in (1000, 1001) for m in range(3)]


def test_torchtitan_with_a_step_of_ones_own(sink: MemorySink, put: Callable[..., type]) -> None:
    trainer_class = put("torchtitan.trainer", "Trainer", Titan)

    class Own(trainer_class):  # type: ignore[misc, valid-type]
        def forward_backward_step(self) -> None:
            self.model(torch.randn(2, 4)).sum().backward()

    model, _ = model_watched()
    Own(model).train(2)

    assert moments(sink) == [(i, m, 0) for i in (0, 1) for m in range(3)]


@pytest.mark.parametrize("managed", [False, True])
def test_deepspeed(sink: MemorySink, put: Callable[..., type], managed: bool) -> None:
    engine_class = put("deepspeed.runtime.engine", "DeepSpeedEngine", Engine)
    model, _ = model_watched()
    engine = engine_class(model, managed=managed)
    engine.global_steps, engine.micro_steps = 50, 0

    for _ in range(2):
        for micro_batch in range(2):
            engine(torch.randn(2, 4)).sum().backward()
            if managed or micro_batch == 1:
                engine.step()

    assert moments(sink) == [(i, m, 0) for i in (50, 51) for m in (0, 1)]


def test_deepspeed_calls_of_one_micro_batch(sink: MemorySink, put: Callable[..., type]) -> None:
    engine_class = put("deepspeed.runtime.engine", "DeepSpeedEngine", Engine)
    model, _ = model_watched()
    engine = engine_class(model)

    for _ in range(4):
        (engine(torch.randn(2, 4)) - engine(torch.randn(2, 4))).sum().backward()
        engine.step()

    assert moments(sink) == [(i, m, c) for i in (0, 1) for m in (0, 1) for c in (0, 1)]


def test_a_framework_that_trains_already_is_followed_from_the_first_forward(
    sink: MemorySink, put: Callable[..., type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported behind the watch, or found by a watch in the middle of it."""
    trainer_class = put("torchtitan.trainer", "Trainer", Titan)
    module = sys.modules.pop("torchtitan.trainer")
    model, _ = model_watched()
    trainer = trainer_class(model)
    trainer.step = 1000

    monkeypatch.setitem(sys.modules, "torchtitan.trainer", module)
    trainer.train(2)

    assert moments(sink) == [(i, m, 0) for i in (1000, 1001) for m in range(3)]


def test_a_call_in_which_a_framework_was_found_counts_until_its_step(
    sink: MemorySink, put: Callable[..., type], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_class = put("deepspeed.runtime.engine", "DeepSpeedEngine", Engine)
    module = sys.modules.pop("deepspeed.runtime.engine")
    model, _ = model_watched()
    engine = engine_class(model)
    engine.global_steps = 20
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)

    engine(torch.randn(2, 4)).sum().backward()
    engine._optimizer.step()  # its caller goes on without the engine
    model(torch.randn(2, 4)).sum().backward()

    assert moments(sink) == [(20, 0, 0), (21, 0, 0)]


def test_methods_are_put_back_by_the_last_remove_or_stay_below_who_patched_them_since(
    sink: MemorySink, put: Callable[..., type]
) -> None:
    trainer_class = put("torchtitan.trainer", "Trainer", Titan)
    own = trainer_class.train_step, trainer_class.forward_backward_step
    model, first = model_watched()
    other, second = model_watched()

    first.remove()
    ours = trainer_class.train_step
    assert ours is not own[0]

    def foreign(self: Any) -> None:
        ours(self)

    trainer_class.train_step = foreign  # type: ignore[attr-defined]
    second.remove()
    assert trainer_class.forward_backward_step is own[1]
    assert trainer_class.train_step is foreign

    third = watch(other, steps="all")
    trainer = trainer_class(other)
    trainer.step = 7
    trainer.train(1)
    assert moments(sink) == [(7, m, 0) for m in range(3)]
    third.remove()
    trainer.train(1)
    assert len(moments(sink)) == 3
    trainer_class.train_step = ours  # type: ignore[attr-defined]
    watch(model).remove()
    assert trainer_class.train_step is own[0]


def test_a_version_never_seen_is_counted_and_said_once(
    sink: MemorySink, put: Callable[..., type], caplog: pytest.LogCaptureFixture
) -> None:
    class Renamed(Engine):
        def __getattribute__(self, name: str) -> Any:
            if name == "micro_steps":
                raise AttributeError(name)
            return super().__getattribute__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    engine_class = put("deepspeed.runtime.engine", "DeepSpeedEngine", Renamed)
    model, _ = model_watched()
    engine = engine_class(model)

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for _ in range(2):
                engine(torch.randn(2, 4)).sum().backward()
            engine._optimizer.step()

    assert moments(sink) == [(i, m, 0) for i in (0, 1) for m in (0, 1)]
    [message] = [record.getMessage() for record in caplog.records]
    assert "micro_steps" in message
    assert "forwards and steps are counted instead" in message


def test_a_class_without_the_method_is_left_alone(sink: MemorySink, put: Callable[..., type]) -> None:
    class Other:
        def run(self, model: nn.Module) -> None:
            model(torch.randn(2, 4)).sum().backward()

    trainer_class = put("torchtitan.trainer", "Trainer", Other)
    before = dict(vars(trainer_class))
    model, _ = model_watched()
    trainer_class().run(model)

    assert moments(sink) == [(0, 0, 0)]
    assert dict(vars(trainer_class)) == before


MEGATRON = """
def check_first_val_step(first_val_step, forward_only, cond):
    return first_val_step and cond if first_val_step is not None and forward_only else cond

def set_current_microbatch(model, microbatch_id):
    pass

def forward_backward_no_pipelining(model, num_microbatches, forward_only=False):
    for i in range(num_microbatches):
        check_first_val_step(None, forward_only, i == 0)
        set_current_microbatch(model, i)
        loss = model(torch.randn(2, 4)).sum()
        if not forward_only:
            loss.backward()
"""


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("megatron.core.pipeline_parallel.schedules")
    vars(module)["torch"] = torch
    exec(MEGATRON, vars(module))  # noqa: S102 - its functions are known by their module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_forwards_behind_a_schedule_of_megatron_are_the_jobs_own(sink: MemorySink, megatron: Any) -> None:
    model, handle = model_watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for _ in range(2):
        megatron.forward_backward_no_pipelining(model, 2)
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    megatron.forward_backward_no_pipelining(model, 2)
    handle.remove()

    assert moments(sink) == [(step, n, 0) for step in range(2) for n in range(4)] + [(2, 0, 0), (2, 1, 0)]


def test_a_training_forward_behind_an_evaluation_of_megatron_is_captured(
    sink: MemorySink, megatron: Any
) -> None:
    model, handle = model_watched()

    megatron.forward_backward_no_pipelining(model, 2, forward_only=True)
    model(torch.randn(2, 4)).sum().backward()
    handle.remove()

    assert moments(sink) == [(0, 0, 0)]


def test_a_root_whose_forward_the_framework_counts_inside_is_no_further_micro_batch(
    sink: MemorySink, put: Callable[..., type]
) -> None:
    engine = put("deepspeed.runtime.engine", "DeepSpeedEngine", Engine)(nn.Sequential(nn.Linear(4, 4)))
    handle = watch(engine, steps="all")

    for _ in range(2):
        for _ in range(2):
            engine(torch.randn(2, 4)).sum().backward()
            engine.step()
    handle.remove()

    assert moments(sink) == [(i, m, 0) for i in (0, 1) for m in (0, 1)]


@pytest.mark.parametrize("loop", [False, True], ids=["own", "megatron's"])
def test_forwards_in_front_of_a_schedule_of_megatron_are_micro_batches_of_its_iteration(
    sink: MemorySink, megatron: Any, monkeypatch: pytest.MonkeyPatch, loop: bool
) -> None:
    args = SimpleNamespace()
    if loop:
        told = SimpleNamespace(_GLOBAL_ARGS=args)
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", told)  # type: ignore[arg-type]
    model, handle = model_watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    for step in range(3):
        args.curr_iteration = step
        model(torch.randn(2, 4)).sum().backward()
        megatron.forward_backward_no_pipelining(model, 2)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    handle.remove()

    assert moments(sink) == [(step, n, 0) for step in range(3) for n in range(4)]
