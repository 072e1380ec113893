"""A test that leaves a watch behind is told so itself (tests/conftest.py)."""

from __future__ import annotations

from torch import nn

from capd_client.watching.watch import watch
from tests.kit import leaks
from tests.kit.client.sink import MemorySink


def test_a_watch_counts_as_left_until_it_is_removed_or_its_model_is_gone(sink: MemorySink) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    handle = watch(model)
    assert leaks.watched_modules() == [model[0]]
    handle.remove()
    assert leaks.watched_modules() == []

    watch(model)
    model = None
    assert leaks.watched_modules() == []
