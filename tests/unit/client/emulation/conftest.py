"""Fixtures of the emulation tests: whatever a test emulates, torch is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from capd_client.emulation import emulation, plans
from capd_client.tensors import emulation_label
from capd_client.watching import attach, watched
from tests.kit.emulated.patched import patched


@pytest.fixture(autouse=True)
def _no_watch_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes what the test watched and emulated. Both patch the same places of torch, so one fixture checks both.

    It takes the place of the fixture of this name that all tests of the client have.
    """
    torch.manual_seed(3)
    before = patched()
    begun: list[attach.WatchHandle | emulation.Emulation] = []

    def remembering(kind: Any) -> None:
        original = kind.__init__

        def remember(self: Any, *args: object) -> None:
            begun.append(self)
            original(self, *args)

        monkeypatch.setattr(kind, "__init__", remember)

    remembering(attach.WatchHandle)
    remembering(emulation.Emulation)
    yield
    for one in begun:
        one.remove()
    assert patched() == before
    assert not plans._modules
    assert not watched._tapped
    assert emulation_label.current() == emulation_label.NONE
