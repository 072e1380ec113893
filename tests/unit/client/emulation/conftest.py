"""Fixtures of the emulation tests: whatever a test emulates, torch is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from capd_client.emulation import emulation, plans
from capd_client.tensors import emulation_label
from tests.kit.emulated.patched import patched


@pytest.fixture(autouse=True)
def _all_is_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes what the test emulated."""
    torch.manual_seed(3)
    before = patched()
    begun: list[emulation.Emulation] = []
    original = emulation.Emulation.__init__

    def remember(self: emulation.Emulation, *args: object) -> None:
        begun.append(self)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(emulation.Emulation, "__init__", remember)
    yield
    for one in begun:
        one.remove()
    assert patched() == before
    assert not plans._modules
    assert emulation_label.current() == emulation_label.NONE


@pytest.fixture(autouse=True)
def _no_watch_left_behind(_all_is_restored: None, _no_watch_left_behind: None) -> None:
    """Removes watches before the check that nothing of an emulation is left: both patch the same places of torch."""
