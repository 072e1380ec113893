"""Fixtures of the client's tests: a peer to talk to, sessions that are closed, watches that are removed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import CheckpointFunction
from tqdm import tqdm

import capd_client
from capd_client.config.settings import ClientConfig
from capd_client.device.holding import Holding
from capd_client.device.pacing import Pace
from capd_client.device.snapshots import DeviceStager
from capd_client.explicit import keys
from capd_client.process.log import RateLimitedLog
from capd_client.session import current
from capd_client.session.session import Session
from capd_client.staging.border import Border
from capd_client.tensor_saver import calls, indices, saver
from capd_client.tensor_saver.state import STATE
from capd_client.watching import attach, late_watch, watch, watched
from tests.kit.client.cuda import FakeStream, Gpus
from tests.kit.client.device import AlwaysDevice, FakeDevice, Rig
from tests.kit.client.peer import Peer
from tests.kit.client.sink import MemorySink

SMALL_ARENA = 1 << 20


@pytest.fixture
def socket_path() -> Iterator[str]:
    """A socket path short enough whatever the temporary directory is."""
    with tempfile.TemporaryDirectory(prefix="capd-") as folder:
        yield os.path.join(folder, "s")


@pytest.fixture
def peer(socket_path: str) -> Iterator[Peer]:
    """A daemon that acknowledges everything."""
    peer = Peer(socket_path)
    yield peer
    peer.close()


@pytest.fixture
def make_session(socket_path: str) -> Iterator[Callable[..., Session]]:
    """Makes sessions on the test's socket with a small arena; closes them without waiting."""
    sessions: list[Session] = []

    def make(**settings: Any) -> Session:
        settings.setdefault("arena_bytes", SMALL_ARENA)
        config = ClientConfig(endpoint=socket_path, **settings)
        session = Session(config, environ={})
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close(0.0)


@pytest.fixture
def rig(make_session: Callable[..., Session]) -> Iterator[Callable[..., Rig]]:
    """Makes fake devices, each with a session of its own if none is given.

    by_hand: the test calls `stager.advance()`, there is no copy pump. ordered, max_held_nbytes: as the stager and
    Holding have them. payload: whether tensors are kept, or statistics alone.
    """

    def make(
        device: FakeDevice | None = None,
        *,
        by_hand: bool = False,
        pace: Pace | None = None,
        session: Session | None = None,
        ordered: bool = False,
        max_held_nbytes: int = 0,
        piece_nbytes: int | None = None,
        payload: bool = True,
        **settings: Any,
    ) -> Rig:
        device = device or FakeDevice()
        session = session or make_session(strict=True, **settings)
        stager = DeviceStager(
            device,
            session.queue,
            session.arena.buffer,
            pace=pace or Pace(None),
            max_block_s=settings.get("max_block_ms", 0.0) / 1e3,
            ordered=ordered,
            holding=Holding(max_held_nbytes),
            piece_nbytes=piece_nbytes,
            on_failure=lambda error: session.notices.warn("device", "copies failed: %s", error),
        )
        stagers.append(stager)
        if not by_hand:
            stager.start()
            session.devices.stagers.append(stager)
        way = AlwaysDevice(session.queue, session.arena, session.notices, lambda _: stager, payload=payload)
        config = session.config if payload else replace(session.config, mode="stats")
        border = Border(config, session.context, session.notices, session.queue, way, session.queue.policy)
        return Rig(session, device, stager, way, border)

    stagers: list[DeviceStager] = []
    yield make
    for stager in stagers:
        stager.stop()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """A machine with two GPUs."""
    return Gpus(monkeypatch)


@pytest.fixture
def allocated(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, FakeStream]]:
    """Device memory is host memory, at most 1 MiB of it; what was asked for where, and on which current stream."""
    empty = torch.empty
    asked: list[tuple[torch.device, FakeStream]] = []

    def allocate(*size: Any, device: torch.device | None = None, **more: Any) -> torch.Tensor:
        if device is not None and device.type == "cuda":
            asked.append((device, gpus.current_stream(gpus.current)))
            if size[0] > 1 << 20:
                raise torch.cuda.OutOfMemoryError
            device = None
        return empty(*size, device=device, **more)

    monkeypatch.setattr(torch, "empty", allocate)
    return asked


@pytest.fixture
def job_env(peer: Peer, tmp_path: Path) -> dict[str, str]:
    """The environment of a job in a process of its own, strict, connected to `peer`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CAPD_", "TENSOR_SAVE"))}
    return env | {
        "CAPD_ENDPOINT": f"unix:{peer.path}",
        "CAPD_STRICT": "1",
        "CAPD_ARENA_BYTES": str(SMALL_ARENA),
    }


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that has not decided yet whether it captures."""

    def forget() -> None:
        current._resolved, current._session, current._closed, current._over = False, None, None, False
        keys.KEYS.clear()

    forget()
    monkeypatch.setenv("CAPD_ARENA_BYTES", str(1 << 20))
    yield monkeypatch
    capd_client.close(0.0)
    forget()


@pytest.fixture
def on(fresh: pytest.MonkeyPatch, peer: Peer) -> Peer:
    """The same with a daemon to talk to."""
    fresh.setenv("CAPD_ENDPOINT", f"unix:{peer.path}")
    return peer


@pytest.fixture
def untold() -> Iterator[None]:
    """A process that has made none of tensor_saver's calls yet."""

    def forget() -> None:
        STATE.__init__()  # type: ignore[misc]
        STATE.on_change = calls._changed
        indices._said.clear()
        indices._index_in.cache_clear()
        indices._rank_in.cache_clear()
        for notices in (indices._notices, calls._notices):
            notices._last.clear()
        saver._saver = calls._followed = None

    forget()
    yield
    forget()


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
    monkeypatch.setattr(late_watch, "_notices", RateLimitedLog())
    torch.compiler.reset()
    yield
    torch.compiler.reset()
