"""Fixtures of the hook tests: an in-memory session, and a check that no watch is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import CheckpointFunction
from tqdm import tqdm

from capd_client.process.log import Notices
from capd_client.watching import attach, late_watch, watch, watched
from tests.kit.client.sink import MemorySink


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemorySink]:
    """The session that `watch` finds; afterwards no tap may have failed."""
    memory = MemorySink()
    monkeypatch.setattr(watch, "session", lambda: memory)
    torch.manual_seed(7)
    yield memory
    assert memory.errors == []


@pytest.fixture(autouse=True)
def _no_watch_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes what the test watched; torch must be as it was before."""
    patched = _patched()
    scaler_step = torch.amp.GradScaler.step
    optimizer_hooks = dict(torch_optimizer._global_optimizer_post_hooks)
    handles: list[attach.WatchHandle] = []
    original = attach.WatchHandle.__init__

    def remember(self: attach.WatchHandle) -> None:
        handles.append(self)
        original(self)

    monkeypatch.setattr(attach.WatchHandle, "__init__", remember)
    yield
    for handle in handles:
        handle.remove()
    assert _patched() == patched
    assert dict(torch_optimizer._global_optimizer_post_hooks) == optimizer_hooks
    assert torch.amp.GradScaler.step is scaler_step
    assert not watched._tapped


def _patched() -> list[object]:
    """What of torch a watch puts its own in the place of."""
    names = ("linear", "multi_head_attention_forward", "scaled_dot_product_attention")
    return [
        CheckpointFunction.forward,
        vars(nn.Module).get("__reduce_ex__"),
        torch.cuda.make_graphed_callables,
        *(getattr(functional, name) for name in names),
    ]


@pytest.fixture
def forget_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was compiled before, and what was warned of then, is not there."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # the compiler's progress bars leave a thread behind
    monkeypatch.setattr(late_watch, "_notices", Notices())
    torch.compiler.reset()
    yield
    torch.compiler.reset()
