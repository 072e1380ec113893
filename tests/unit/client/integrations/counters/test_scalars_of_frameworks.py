"""The scalars of frameworks: numbers are recorded once, anything else costs the job nothing."""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

import capd_client
from tests.kit.client.peer import Peer

MEGATRON = """
def check_first_val_step(first_val_step, forward_only, cond):
    return cond

def set_current_microbatch(model, microbatch_id):
    pass

def forward_step_calc_loss(
    model, output_tensor, loss_func, config, vp_stage, collect_non_loss_data, num_microbatches, forward_data_store
):
    forward_data_store.append(loss_func())
    return output_tensor
"""


@pytest.fixture
def losses(on: Peer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Lets a stand-in for Megatron compute losses while a model is watched."""
    module = ModuleType("megatron.core.pipeline_parallel.schedules")
    exec(MEGATRON, vars(module))  # noqa: S102 - its functions are known by their module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    capd_client.watch(nn.Linear(2, 2))
    return lambda found: module.forward_step_calc_loss(0, "output", lambda: found, 0, 0, 0, 0, [])


def values(peer: Peer, name: str) -> list[float]:
    return [struct.unpack("<d", data)[0] for data in peer.data_of(name)]


def test_a_loss_that_is_no_number_does_not_reach_megatron(on: Peer, losses: Callable[[Any], Any]) -> None:
    odd = {"none": (0, 0), "text": "fp", "missing": [None, 1], "shapes": (torch.zeros(2), torch.zeros(3))}
    assert losses({**odd, "lm": [torch.tensor(6.0), 2], "aux": torch.tensor([1.0, 4.0])}) == "output"

    assert capd_client.flush(10)
    assert {one.key.tensor_name for one in on.records} == {"lm", "aux"}
    assert (values(on, "lm"), values(on, "aux")) == ([3.0], [0.25])


class Countless:
    """A sum of losses that counts its divisions."""

    divisions = 0

    def __truediv__(self, _: object) -> float:
        self.divisions += 1
        return 0.0


def test_without_a_session_nothing_is_computed(on: Peer, losses: Callable[[Any], Any]) -> None:
    total = Countless()
    losses({"lm": (total, 1)})
    assert total.divisions == 1

    capd_client.close(10)
    losses({"lm": (total, 1)})
    assert total.divisions == 1


def test_a_failing_counter_around_a_call_does_not_reach_the_job(
    losses: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from capd_client.integrations.counters import megatron

    def broken(_: object) -> None:
        raise RuntimeError("another version")

    monkeypatch.setattr(megatron, "megatron_losses", broken)
    assert losses({"lm": 1.0}) == "output"


def test_clip_grad_norm_stays_the_function_that_it_was(on: Peer) -> None:
    early = nn.utils.clip_grad_norm_
    model = nn.Linear(2, 2)
    handle = capd_client.watch(model)
    model(torch.ones(1, 2)).sum().backward()

    assert nn.utils.clip_grad_norm_ is clip_grad.clip_grad_norm_ is early
    assert pickle.loads(pickle.dumps(nn.utils.clip_grad_norm_)) is early  # noqa: S301 - written above
    norm = float(early(model.parameters(), 1.0))
    handle.remove()
    assert capd_client.flush(10)
    assert values(on, "grad_norm") == [norm]


def test_of_norms_inside_each_other_the_outermost_is_recorded(
    on: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FP32Optimizer:
        def step(self) -> tuple[bool, float, None]:
            return True, 1.0, None

    class ChainedOptimizer:
        def step(self) -> tuple[bool, float, None]:
            FP32Optimizer().step()
            FP32Optimizer().step()
            return True, 2.0, None

    module: Any = SimpleNamespace(FP32Optimizer=FP32Optimizer, ChainedOptimizer=ChainedOptimizer)
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.optimizer", module)
    capd_client.watch(nn.Linear(2, 2))

    ChainedOptimizer().step()
    FP32Optimizer().step()
    assert capd_client.flush(10)
    assert values(on, "grad_norm") == [2.0, 1.0]
