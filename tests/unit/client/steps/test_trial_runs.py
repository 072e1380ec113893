"""Forwards that train nothing though they look like training: no record, no micro-batch, whatever runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from capd_client.process.log import RateLimitedLog
from capd_client.steps import trial_runs
from capd_client.watching.watch import watch
from tests.kit.client.sink import MemorySink

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "counted": lambda: FlopCounterMode(display=False),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runs, "_notices", RateLimitedLog())


def moments(sink: MemorySink) -> list[tuple[int, int, int]]:
    return [c.at for c in sink.captured if c.key.tensor_name == "input"]


def step(model: nn.Module, micro_batches: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(micro_batches):
        model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_that_is_counted_or_faked_is_a_trial(
    sink: MemorySink, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    watch(model)

    with caplog.at_level(logging.WARNING), MODES[mode]():
        for _ in range(2):
            model(torch.ones(2, 4))
    step(model)
    with MODES[mode]():
        model(torch.ones(2, 4)).sum().backward()
    step(model)

    assert moments(sink) == [(i, m, 0) for i in (0, 1) for m in (0, 1)]
    [message] = [record.getMessage() for record in caplog.records]
    assert "Mode are taken for trials: not captured, not counted" in message


def test_a_counter_counts_a_watched_model_as_an_unwatched_one(sink: MemorySink) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(2, 4)).sum().backward()
        counts.append(counter.get_total_flops())
        watch(model)

    assert counts[0] == counts[1] > 0


def test_a_forward_that_make_fx_traces_is_a_trial(sink: MemorySink) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    watch(model)

    make_fx(model)(torch.ones(2, 4))
    step(model)

    assert moments(sink) == [(0, 0, 0), (0, 1, 0)]


def test_a_trial_that_raises_is_over(sink: MemorySink) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.fails = nn.Linear(4, 4), True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("out of memory")
            return self.fc(x)

    model = Fails()
    watch(model)

    with pytest.raises(RuntimeError, match="out of memory"), FlopCounterMode(display=False):
        model(torch.ones(2, 4))
    model.fails = False
    step(model)

    assert not trial_runs.trying()
    assert moments(sink) == [(0, 0, 0), (0, 1, 0)]


def test_the_forward_that_initialises_lazy_modules_is_a_trial(sink: MemorySink) -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3))
    watch(model)

    model(torch.ones(2, 4))
    step(model)

    assert moments(sink) == [(0, m, 0) for m in (0, 1) for _ in model]
    assert {(c.key.module, c.key.tensor_name) for c in sink.captured} == {
        (module, name) for module in "01" for name in ("input", "weight", "output", "grad_output")
    }


def test_modes_that_train_are_no_trials(sink: MemorySink) -> None:
    """Selective checkpointing, and whatever is not known to count or trace."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Unknown(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(4, 4))
    watch(model)
    with Unknown():
        step(model)

    assert moments(sink) == [(0, 0, 0), (0, 1, 0)]
